"""The secret of a job: where it comes from, and that it goes nowhere."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import zmq

from groupio.controller import keys as keys_module
from groupio.controller.keys import Keys
from groupio.errors import InvalidInput

TOKEN = b"0123456789abcdef0123456789abcdef"


def values(keys: Keys) -> list[bytes]:
    return [getattr(keys, name) for name in Keys.__slots__]


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
