"""The secret of a job: where it comes from, and that it goes nowhere."""

from __future__ import annotations

import errno
import os
import pickle
import stat
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import zmq

from fuse_mount import FuseMount
from groupio.backend import mounts
from groupio.backend.posix import PosixBackend
from groupio.controller import keys as keys_module
from groupio.controller.keys import Keys
from groupio.errors import InvalidInput

TOKEN = b"0123456789abcdef0123456789abcdef"


def values(keys: Keys) -> list[bytes]:
    return [getattr(keys, name) for name in Keys.__slots__ if name != "of_store"]


def private(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    path.chmod(0o600)
    return path


def test_one_token_gives_everyone_the_same_keys() -> None:
    first, second = Keys.from_token(TOKEN), Keys.from_token(TOKEN)
    assert values(first) == values(second)
    other = Keys.from_token(TOKEN + b"x")
    assert not set(values(first)) & set(values(other))
    assert len(set(values(first))) == 5
    assert zmq.curve_public(first.server_secret) == first.server_public
    assert zmq.curve_public(first.client_secret) == first.client_public
    assert len(first.fabric_key) == 32


def test_made_keys_are_new() -> None:
    assert not set(values(Keys.make())) & set(values(Keys.make()))


@pytest.mark.parametrize("token", [b"", b"x" * 15, b"x" * 4097])
def test_a_token_of_a_useless_length(token: bytes) -> None:
    with pytest.raises(InvalidInput, match="16 to 4096 bytes"):
        Keys.from_token(token)


def test_keys_show_nothing_and_do_not_travel() -> None:
    keys = Keys.from_token(TOKEN)
    shown = f"{keys} {keys!r} {[keys]}"
    assert shown == "Keys(...) Keys(...) [Keys(...)]"
    with pytest.raises(TypeError, match="do not leave the process"):
        pickle.dumps(keys)


def test_files_of_keys(tmp_path: Path) -> None:
    keys = Keys.make()
    path = tmp_path / "keys"
    keys.save(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert values(Keys.load(path)) == values(keys)
    with pytest.raises(FileExistsError):
        keys.save(path)


def test_files_of_a_token(tmp_path: Path) -> None:
    path = private(tmp_path / "token", b"  " + TOKEN + b"\n")
    assert values(Keys.load(str(path))) == values(Keys.from_token(TOKEN))


def broken(data: bytes) -> list[bytes]:
    lines = data.splitlines()
    other = Keys.make()
    return [
        b"\n".join(lines[:-1]),
        b"\n".join([*lines, lines[-1]]),
        b"\n".join([*lines[:-1], b"fabric-key short"]),
        b"\n".join([*lines[:-1], b"fabric-key " + b"~" * 40]),
        b"\n".join([*lines[:-1], b""]),
        data.replace(lines[1].split()[1], other.server_public),
        data.replace(lines[4].split()[1], other.client_secret),
    ]


def test_a_damaged_file_of_keys(tmp_path: Path) -> None:
    Keys.make().save(tmp_path / "keys")
    for number, data in enumerate(broken((tmp_path / "keys").read_bytes())):
        path = private(tmp_path / f"broken-{number}", data)
        with pytest.raises(InvalidInput, match="make it anew") as caught:
            Keys.load(path)
        assert str(path) in caught.value.message
        assert not any(word in caught.value.message for word in data.decode().split()[3:])


@pytest.mark.parametrize("line", range(1, 6))
def test_a_key_of_more_bits_than_there_are(tmp_path: Path, line: int) -> None:
    path = tmp_path / "keys"
    Keys.make().save(path)
    lines = path.read_text().splitlines()
    lines[line] = f"{lines[line].split()[0]} {'#' * 40}"
    path.write_text("\n".join(lines))
    with pytest.raises(InvalidInput, match="make it anew"):
        Keys.load(path)


def test_files_that_others_can_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = private(tmp_path / "token", TOKEN)
    for mode in (0o640, 0o604, 0o620, 0o644):
        path.chmod(mode)
        with pytest.raises(InvalidInput, match=f"mode {mode:04o}.* chmod 600"):
            Keys.load(path)
    path.chmod(0o400)
    Keys.load(path)
    stranger = path.stat().st_uid + 1
    monkeypatch.setattr(keys_module.os, "geteuid", lambda: stranger)
    if path.stat().st_uid == 0:
        Keys.load(path)  # root may give it to anybody
        keys_module.os.chown(path, stranger + 1, -1)
    with pytest.raises(InvalidInput, match="belongs to user"):
        Keys.load(path)


def test_files_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="cannot be read: No such file"):
        Keys.load(tmp_path / "absent")
    with pytest.raises(InvalidInput, match="not a regular file"):
        Keys.load(tmp_path)
    with pytest.raises(InvalidInput, match="longer than 4096 bytes"):
        Keys.load(private(tmp_path / "long", b"x" * 4097))
    with pytest.raises(InvalidInput, match="short: a job token has"):
        Keys.load(private(tmp_path / "short", b"secret"))


def test_where_the_token_comes_from(tmp_path: Path) -> None:
    path = str(private(tmp_path / "token", TOKEN))
    word = TOKEN.decode()
    assert Keys.from_env({}) is None
    assert Keys.from_env({"GROUPIO_TOKEN": ""}) is None
    for environ in ({"GROUPIO_TOKEN": word}, {"GROUPIO_TOKEN_FILE": path}):
        keys = Keys.from_env(environ)
        assert keys is not None
        assert values(keys) == values(Keys.from_token(TOKEN))
    with pytest.raises(InvalidInput, match="both set"):
        Keys.from_env({"GROUPIO_TOKEN": word, "GROUPIO_TOKEN_FILE": path})
    with pytest.raises(InvalidInput, match="GROUPIO_TOKEN: a job token has") as caught:
        Keys.from_env({"GROUPIO_TOKEN": "tell-nobody"})
    assert "tell-nobody" not in caught.value.message


# -- the key in a store -------------------------------------------------------------------------


@pytest.fixture
def store(tmp_path: Path) -> Iterator[PosixBackend]:
    with PosixBackend.open(tmp_path / "store", create=True) as backend:
        yield backend


def key_file(store: PosixBackend) -> Path:
    return Path(store.path, "controllers", "key")


@pytest.mark.parametrize("umask", [0, 0o022, 0o077, 0o277, 0o777])
@pytest.mark.parametrize("file_mode", [None, 0o666])
def test_agents_of_one_user_share_a_key_that_only_they_can_read(
    tmp_path: Path, umask: int, file_mode: int | None
) -> None:
    with PosixBackend.open(tmp_path / "store", create=True, file_mode=file_mode) as store:
        before = os.umask(umask)
        try:
            first = Keys.of(store)
        finally:
            os.umask(before)
        assert first.of_store
        assert values(Keys.of(store)) == values(first)
        assert stat.S_IMODE(key_file(store).stat().st_mode) == 0o600
        assert first.fabric_key.hex() not in key_file(store).read_text()
        assert [name for name in os.listdir(key_file(store).parent) if name != "key"] == []
    with PosixBackend.open(tmp_path / "other", create=True) as other:
        assert not set(values(Keys.of(other))) & set(values(first))


def test_racing_agents_take_one_key(tmp_path: Path, store: PosixBackend) -> None:
    def take(_: int) -> list[bytes]:
        with PosixBackend.open(store.path, create=False) as own:
            return values(Keys.of(own))

    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(take, range(16)))
    assert all(one == found[0] for one in found)


def spoil_link(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


def spoil_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (spoil_link, "is a symbolic link: remove it"),
        (spoil_directory, "is not a regular file"),
        (lambda path: path.chmod(0o640), "has the mode 0640 instead of 0600"),
        (lambda path: path.chmod(0o604), "has the mode 0604 instead of 0600"),
        (lambda path: os.chown(path, 65534, 65534), f"belongs to user 65534, not to {os.getuid()}"),
    ],
    ids=["link", "directory", "group", "others", "owner"],
)  # fmt: skip
def test_a_key_that_others_may_know_is_not_used(
    store: PosixBackend, spoil: Callable[[Path], None], why: str
) -> None:
    Keys.of(store)
    spoil(key_file(store))
    with pytest.raises(InvalidInput, match=f"need a token: .*{why}.*GROUPIO_TOKEN_FILE"):
        Keys.of(store)


@pytest.mark.parametrize("data", [b"", b"groupio store key 1\n", b"x" * 5000])
def test_a_key_that_is_cut_off(store: PosixBackend, data: bytes) -> None:
    private(key_file(store), data)
    with pytest.raises(InvalidInput, match=r"controllers/key is damaged: .*remove it"):
        Keys.of(store)
    assert key_file(store).read_bytes() == data, "other agents may have the right one still"


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
@pytest.mark.parametrize(
    ("option", "why"),
    [
        ("--perms=a+r", "has the mode 0644"),
        ("--create-for-user=65534", "belongs to user 65534"),
        ("--force-user=65534", "belongs to user 65534"),
    ],
)
def test_a_file_system_that_gives_files_other_modes_or_owners(
    tmp_path: Path, option: str, why: str
) -> None:
    mount = FuseMount(tmp_path / "source", tmp_path / "mount", option).up()
    try:
        with PosixBackend.open(mount.where / "store", create=True) as store:
            with pytest.raises(InvalidInput, match=f"need a token: .*{why}"):
                Keys.of(store)
            assert store.list("controllers") == [], "no key lies about"
    finally:
        mount.close()


def test_a_file_system_that_changes_no_modes(
    store: PosixBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(fd: int, mode: int) -> None:
        raise PermissionError(errno.EPERM, "not here")

    monkeypatch.setattr(os, "fchmod", refuse)
    before = os.umask(0o277)
    try:
        with pytest.raises(InvalidInput, match="does not give it the mode 0600"):
            Keys.of(store)
    finally:
        os.umask(before)
    assert store.list("controllers") == []


def test_mounts_that_serve_every_user_with_the_rights_of_one(
    store: PosixBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    for kind, options, safe in (
        ("fuse.sshfs", "rw,user_id=0,allow_other", False),
        ("fuse", "rw,allow_other,default_permissions", True),
        ("fuse.sshfs", "rw,user_id=1000", True),
        ("cifs", "rw,noperm", False),
        ("cifs", "rw", True),
        ("ext4", "rw,noperm,allow_other", True),
    ):
        found = (kind, frozenset(options.split(",")))
        monkeypatch.setattr(mounts, "_mount", lambda fd, found=found: found)
        assert mounts.keeps_modes(0) is safe
        if safe:
            Keys.of(store)
        else:
            with pytest.raises(InvalidInput, match="lets every user read"):
                Keys.of(store)
