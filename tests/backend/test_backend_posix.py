"""The POSIX backend passes the suite, with links and without, and has its own traps closed."""

from __future__ import annotations

import errno
import os
import shutil
import socket
import stat
import struct
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from backend_tools import mounted, unprivileged

from groupio.backend.base import EPOCHS, FOLDERS, INFLIGHT, PREPARED, SEGMENTS, Backend
from groupio.backend.mounts import filesystem_type, is_node_local
from groupio.backend.posix import PosixBackend
from groupio.backend.tree import store_path
from groupio.errors import InvalidInput, NotFound, StorageError
from groupio.testing.backend_suite import KEY, BackendSuite, pages


class TestPosix(BackendSuite):
    def open_backend(self, place: Path, *, create: bool) -> Backend:
        return PosixBackend.open(place / "store", create=create)


class TestPosixWithoutLinks(BackendSuite):
    """File systems that refuse hard links: the decision is a rename that never replaces."""

    @pytest.fixture(autouse=True)
    def no_links(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(*_: object, **__: object) -> None:
            raise PermissionError(errno.EPERM, "no links here")

        monkeypatch.setattr(os, "link", refuse)

    def open_backend(self, place: Path, *, create: bool) -> Backend:
        return PosixBackend.open(place / "store", create=create)

    def test_mode_is_reported(self, store: Backend) -> None:
        assert store.info().commit_mode == "rename_noreplace"


@pytest.fixture
def store(tmp_path: Path) -> Iterator[PosixBackend]:
    with PosixBackend.open(tmp_path / "store", create=True) as backend:
        yield backend


@pytest.fixture
def public_dir() -> Iterator[Path]:
    """A directory that other users can reach; pytest's own are private."""
    path = Path(tempfile.mkdtemp())
    path.chmod(0o755)
    yield path
    shutil.rmtree(path)


# Addresses --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "path"),
    [
        ("/a/b", "/a/b"),
        ("/a/../b/", "/b"),
        ("file:///a/b%20c%23", "/a/b c#"),
        ("file://localhost/a", "/a"),
        ("FILE:///a", "/a"),
        (Path("/x"), "/x"),
    ],
)
def test_paths_and_file_urls(given: str | Path, path: str) -> None:
    assert store_path(given) == path


def test_relative_path_is_made_absolute() -> None:
    assert store_path("runs/a") == os.path.join(os.getcwd(), "runs/a")


@pytest.mark.parametrize(
    "given",
    ["", "a\0b", "s3://bucket/x", "memory://x", "file://host/x", "file:///a?b", "file:///a#b"],
)
def test_other_addresses_are_refused(given: str) -> None:
    with pytest.raises(InvalidInput) as error:
        store_path(given)
    assert repr(given) in error.value.message


def test_store_path_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(StorageError) as error:
            PosixBackend.open(path, create=True)
        assert error.value.errno == errno.ENOTDIR
        assert "directory" in error.value.message
    with pytest.raises(StorageError) as error:
        PosixBackend.open(tmp_path / "file", create=False)
    assert error.value.errno == errno.ENOTDIR


def test_absent_and_unreadable_are_different(public_dir: Path) -> None:
    (public_dir / "locked").mkdir(mode=0o700)
    PosixBackend.open(public_dir / "locked", create=True).close()
    with unprivileged():
        with pytest.raises(NotFound):
            PosixBackend.open(public_dir / "absent", create=False)
        if os.geteuid() == 65534:
            with pytest.raises(StorageError) as error:
                PosixBackend.open(public_dir / "locked", create=False)
            assert error.value.errno == errno.EACCES
            with pytest.raises(StorageError) as error:
                PosixBackend.open(public_dir / "new" / "store", create=True)
            assert error.value.errno == errno.EACCES
    assert not (public_dir / "new").exists()


def test_symbolic_link_that_leads_nowhere(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "absent")
    with pytest.raises(StorageError, match="leads nowhere"):
        PosixBackend.open(tmp_path / "link", create=True)


def test_link_to_a_store_is_the_same_store(store: PosixBackend, tmp_path: Path) -> None:
    store.ensure_store_record("job")
    (tmp_path / "link").symlink_to(tmp_path / "store")
    with PosixBackend.open(tmp_path / "link", create=False) as other:
        assert other.identity == store.identity
        other.check_identity()


# Modes ------------------------------------------------------------------------------------------


def modes_under(path: Path) -> set[tuple[bool, int]]:
    return {
        (found.is_dir(), stat.S_IMODE(found.stat().st_mode)) for found in [path, *path.rglob("*")]
    }


def fill(path: Path, **modes: int | None) -> None:
    """A store with one file of each kind."""
    with PosixBackend.open(path, create=True, **modes) as store:
        store.ensure_store_record("job")
        store.prepare(KEY, b"x")
        segment = store.create_segment("s.seg")
        segment.sync_close(0)
        with store.doors() as doors, doors.create("7") as door:
            door.create(".metadata").sync_close()
            door.publish()


@pytest.fixture
def private_umask() -> Iterator[None]:
    """The agent's."""
    before = os.umask(0o077)
    yield
    os.umask(before)


@pytest.mark.parametrize(
    ("file_mode", "umask", "expected"),
    [
        (None, 0o022, (0o644, 0o755)),
        (None, 0o002, (0o664, 0o775)),
        (None, 0o027, (0o640, 0o750)),
        (None, 0o077, (0o600, 0o700)),
        (None, 0o777, (0o600, 0o700)),
        (0o640, 0o002, (0o640, 0o750)),
        (0o666, 0o077, (0o666, 0o777)),
    ],
)
@pytest.mark.usefixtures("private_umask")
def test_file_modes(
    tmp_path: Path, file_mode: int | None, umask: int, expected: tuple[int, int]
) -> None:
    """What a process with that umask would give, whatever the umask of this one."""
    fill(tmp_path / "a" / "store", file_mode=file_mode, umask=umask)
    assert modes_under(tmp_path / "a") == {(False, expected[0]), (True, expected[1])}


@pytest.mark.usefixtures("private_umask")
def test_modes_of_this_process_where_no_others_are_given(tmp_path: Path) -> None:
    os.umask(0o027)
    fill(tmp_path / "a" / "store")
    assert modes_under(tmp_path / "a") == {(False, 0o640), (True, 0o750)}


@pytest.mark.parametrize("file_mode", [None, 0o660])
@pytest.mark.usefixtures("private_umask")
def test_a_directory_of_a_group_gives_its_group_to_all_below(
    tmp_path: Path, file_mode: int | None
) -> None:
    (tmp_path / "shared").mkdir()
    os.chown(tmp_path / "shared", -1, 4321)
    (tmp_path / "shared").chmod(0o2775)
    fill(tmp_path / "shared" / "store", umask=0o002, file_mode=file_mode)
    found = [tmp_path / "shared" / "store", *(tmp_path / "shared" / "store").rglob("*")]
    assert {path.stat().st_gid for path in found} == {4321}
    folders = [stat.S_IMODE(path.stat().st_mode) for path in found if path.is_dir()]
    assert all(mode & 0o2070 == 0o2070 for mode in folders)


@pytest.mark.usefixtures("private_umask")
def test_a_directory_with_a_default_list_overrules_the_umask(tmp_path: Path) -> None:
    """As for every tool: what is new below it gets what the list says."""
    shared = tmp_path / "shared"
    shared.mkdir()
    # user::rwx, group::r-x, mask::rwx, group 4321:rwx, other::---
    entries = ((1, 7, -1), (4, 5, -1), (8, 7, 4321), (16, 7, -1), (32, 0, -1))
    packed = [struct.pack("<HHi", tag, bits, number) for tag, bits, number in entries]
    try:
        os.setxattr(shared, "system.posix_acl_default", struct.pack("<I", 2) + b"".join(packed))
    except OSError as error:
        pytest.skip(f"peer not installed: access lists here ({error.strerror})")
    fill(shared / "store", umask=0o077)
    (shared / "plain").mkdir()
    (shared / "plain" / "file").touch()
    plain = (stat.S_IMODE((shared / "plain" / "file").stat().st_mode) & 0o777,
             stat.S_IMODE((shared / "plain").stat().st_mode) & 0o777)  # fmt: skip
    assert modes_under(shared / "store") == {(False, plain[0]), (True, plain[1])}


def test_a_file_system_without_modes_is_no_error_unless_they_were_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(fd: int, mode: int) -> None:
        raise PermissionError(errno.EPERM, "not here")

    monkeypatch.setattr(os, "fchmod", refuse)
    fill(tmp_path / "store", umask=0o002)
    with pytest.raises(StorageError):
        fill(tmp_path / "other", file_mode=0o666)


@pytest.mark.parametrize("file_mode", [0o400, 0o770, 0o4600, -1])
def test_bad_file_modes(tmp_path: Path, file_mode: int) -> None:
    with pytest.raises(InvalidInput):
        PosixBackend.open(tmp_path / "store", create=True, file_mode=file_mode)


# Planted names ----------------------------------------------------------------------------------


def test_symbolic_links_inside_are_not_followed(store: PosixBackend, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(b"keep me")
    (tmp_path / "store" / EPOCHS / "x").symlink_to(victim)
    (tmp_path / "store" / SEGMENTS / "x").symlink_to(tmp_path / "new")
    with pytest.raises(StorageError) as error:
        store.read(EPOCHS, "x")
    assert error.value.errno == errno.ELOOP
    assert not store.put_if_absent(EPOCHS, "x", b"evil")
    with pytest.raises(StorageError):
        store.create_segment("x")
    assert victim.read_bytes() == b"keep me"
    assert not (tmp_path / "new").exists()


def test_folder_that_is_a_symbolic_link(store: PosixBackend, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (tmp_path / "store" / SEGMENTS).rmdir()
    (tmp_path / "store" / SEGMENTS).symlink_to(elsewhere)
    for create in (True, False):
        with pytest.raises(StorageError) as error:
            PosixBackend.open(tmp_path / "store", create=create).create_segment("x")
        assert error.value.errno == errno.ELOOP
    assert list(elsewhere.iterdir()) == []


def test_pipes_and_directories_in_place_of_records(store: PosixBackend, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "store" / EPOCHS / "pipe")
    (tmp_path / "store" / EPOCHS / "dir").mkdir()
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(tmp_path / "store" / EPOCHS / "sock"))
    for name in ("pipe", "dir", "sock"):
        with pytest.raises(StorageError):
            store.read(EPOCHS, name)


# Identity ---------------------------------------------------------------------------------------


@pytest.mark.root
@pytest.mark.parametrize("below", ["", EPOCHS])
def test_mount_over_the_store_is_noticed(store: PosixBackend, tmp_path: Path, below: str) -> None:
    store.ensure_store_record("job")
    with mounted(tmp_path / "store" / below, "-t", "tmpfs", "tmpfs"):
        with pytest.raises(StorageError) as error:
            store.check_identity()
        assert error.value.errno == errno.EREMCHG
        # What is open leads to the old store still, never to the new mount.
        assert store.put_if_absent(EPOCHS, "x", b"old store")
        assert not (tmp_path / "store" / EPOCHS / "x").exists()
    store.check_identity()
    assert (tmp_path / "store" / EPOCHS / "x").read_bytes() == b"old store"


def test_replaced_store_is_noticed(store: PosixBackend, tmp_path: Path) -> None:
    store.ensure_store_record("job")
    (tmp_path / "store").rename(tmp_path / "moved")
    with pytest.raises(StorageError) as error:
        store.check_identity()
    assert error.value.errno == errno.ENOENT
    PosixBackend.open(tmp_path / "store", create=True).close()
    with pytest.raises(StorageError) as error:
        store.check_identity()
    assert error.value.errno == errno.EREMCHG


def test_replaced_record_is_noticed(store: PosixBackend, tmp_path: Path) -> None:
    record = store.ensure_store_record("job")
    (tmp_path / "store" / "groupio.json").unlink()
    with pytest.raises(StorageError, match="None"):
        store.check_identity()
    with PosixBackend.open(tmp_path / "store", create=True) as other:
        new = other.ensure_store_record("job")
    assert new.store_id != record.store_id


# Stores that cannot be written ------------------------------------------------------------------


@pytest.mark.root
def test_read_only_store_reads(store: PosixBackend, tmp_path: Path) -> None:
    store.ensure_store_record("job")
    store.put(EPOCHS, "x", b"data", durable=True)
    (tmp_path / "again").mkdir()
    with (
        mounted(tmp_path / "again", "-o", "bind,ro", str(tmp_path / "store")),
        PosixBackend.open(tmp_path / "again", create=True) as frozen,
    ):
        assert frozen.read(EPOCHS, "x") == b"data"
        assert frozen.store_record() == store.store_record()
        info = frozen.info()
        assert (info.writable, info.commit_mode) == (False, "none")
        for write in (
            lambda: frozen.put_if_absent(EPOCHS, "y", b""),
            lambda: frozen.prepare(KEY, b""),
            lambda: frozen.create_segment("s"),
            lambda: frozen.delete(EPOCHS, "x"),
        ):
            with pytest.raises(StorageError) as error:
                write()
            assert error.value.errno == errno.EROFS
            assert "read-only" in error.value.message


def test_store_with_missing_folders(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    with PosixBackend.open(tmp_path / "store", create=False) as bare:
        assert all(bare.list(folder) == [] for folder in FOLDERS)
        assert not bare.exists(EPOCHS, "x")
        with pytest.raises(NotFound):
            bare.read(EPOCHS, "x")
        bare.delete(EPOCHS, "x")
        with pytest.raises(StorageError):
            bare.put(EPOCHS, "x", b"", durable=False)
        PosixBackend.open(tmp_path / "store", create=True).close()
        bare.put(EPOCHS, "x", b"", durable=False)


# Leftovers --------------------------------------------------------------------------------------


def test_unfinished_records_are_hidden_and_removed(store: PosixBackend, tmp_path: Path) -> None:
    left = tmp_path / "store" / PREPARED / ".tmp-left"
    fresh = tmp_path / "store" / EPOCHS / ".tmp-fresh"
    for path in (left, fresh):
        path.write_bytes(b"x")
    os.utime(left, (time.time() - 7200,) * 2)
    assert store.list(PREPARED) == store.list(EPOCHS) == []
    assert store.remove_temporary(3600.0) == 1
    assert fresh.exists()
    assert not left.exists()


def test_nothing_temporary_stays(store: PosixBackend, tmp_path: Path) -> None:
    store.ensure_store_record("job")
    store.info()
    store.put(INFLIGHT, "x", b"1", durable=True)
    store.put_if_absent(INFLIGHT, "x", b"2")
    store.prepare(KEY, b"3")
    store.commit_prepared(KEY)
    store.create_segment("s").abort()
    names = {str(p.relative_to(tmp_path / "store")) for p in (tmp_path / "store").rglob("*")}
    assert names == {*FOLDERS, "groupio.json", f"{EPOCHS}/{KEY}", f"{INFLIGHT}/x"}


# File systems -----------------------------------------------------------------------------------


def test_shared_file_systems_are_known() -> None:
    assert not any(map(is_node_local, ("nfs4", "lustre", "ceph", "gpfs", "beegfs")))
    assert all(map(is_node_local, ("ext4", "xfs", "tmpfs", "overlay", "unknown")))


@pytest.mark.root
def test_file_system_type_is_found(small_disk: Path, tmp_path: Path) -> None:
    with PosixBackend.open(small_disk / "store", create=True) as store:
        info = store.info()
        assert (info.filesystem, info.node_local) == ("tmpfs", True)
        assert info.free_bytes is not None
        assert 0 < info.free_bytes <= 4 << 20
    assert filesystem_type(-1) == "unknown"


def test_direct_writes_where_the_file_system_has_them(store: PosixBackend) -> None:
    # The test machine's disk may have none; then the mode must say so and the data be right.
    segment = store.create_segment("s.seg")
    data = pages(4)
    segment.write(0, [data])
    mode = segment.io_mode
    segment.sync_close(len(data))
    assert mode == store.info().io_mode
    assert store.read(SEGMENTS, "s.seg") == bytes(data)
