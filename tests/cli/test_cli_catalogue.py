"""The catalogue of old decisions saves opening them, and nothing depends on what it says."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from cli_help import Command
from store_maker import StoreMaker

from groupio.agent.identity import Writer
from groupio.backend.base import CATALOGUE, EPOCHS, ROOT
from groupio.backend.posix import PosixBackend
from groupio.client.store_reader import StoreReader
from groupio.controller.recovery import recover
from groupio.controller.store import JobStore
from groupio.errors import StorageError
from groupio.format.catalogue import Entry, decode_catalogue, encode_catalogue
from groupio.format.limits import RECORD_VERSION
from groupio.model import DecisionKey
from groupio.plan import dedup
from groupio.protocol import events as ev
from groupio.store import catalogue

WRITER = Writer("boot", 1, 1, "host")
EPOCHS_MADE = 40
ABORTED = DecisionKey(1, 5, 1)


@pytest.fixture(autouse=True)
def recent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalogue, "RECENT", 4)


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    made = StoreMaker(tmp_path_factory.mktemp("catalogue") / "store")
    made.abort(ABORTED)
    for epoch in range(EPOCHS_MADE):
        if epoch == ABORTED.epoch:
            continue
        made.commit(epoch, [{"a": b"%d" % epoch}], metadata={"n": epoch}, incarnation=1 + epoch)
    yield made.path
    made.close()


@pytest.fixture
def store(template: Path, tmp_path: Path) -> Iterator[PosixBackend]:
    with PosixBackend.open(shutil.copytree(template, tmp_path / "store"), create=False) as opened:
        yield opened


def state_of(store: PosixBackend) -> ev.StoreState:
    return recover(store, WRITER, "job", frozenset(), fence=True)


def entries_of(store: PosixBackend) -> list[Entry]:
    path = Path(store.path, CATALOGUE)
    return decode_catalogue(path.read_bytes(), store.store_record().store_id, str(path))


def write(store: PosixBackend, entries: list[Entry]) -> None:
    data = encode_catalogue(store.store_record().store_id, entries)
    store.replace(ROOT, CATALOGUE, data)


def all_is_there(store: PosixBackend) -> None:
    """Every epoch loads with its bytes, no segment is gone, and the newest is the newest."""
    with StoreReader.open(store.path) as reader:
        assert reader.resolve("latest").header.epoch == EPOCHS_MADE - 1
        for epoch in range(EPOCHS_MADE):
            if epoch != ABORTED.epoch:
                items = reader.read_items(reader.resolve(epoch), 0)
                assert items == {"a": b"%d" % epoch}
    assert len(store.list("segments")) == EPOCHS_MADE - 1


def test_old_decisions_are_not_opened(
    store: PosixBackend, groupio: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []
    reader = PosixBackend.reader

    def counting(self: PosixBackend, folder: str, name: str) -> object:
        opened.append(name)
        return reader(self, folder, name)

    before = groupio("ls", store.path, "--json").json
    with StoreReader.open(store.path) as listing:
        infos = listing.epochs()
    first = state_of(store)
    monkeypatch.setattr(PosixBackend, "reader", counting)
    assert state_of(store) == first
    assert first.aborted == (ABORTED,)
    assert first.incarnation == EPOCHS_MADE
    with StoreReader.open(store.path) as listing:
        assert listing.epochs() == infos
    assert groupio("ls", store.path, "--json").json == before
    decisions = [name for name in opened if name.startswith("L")]
    assert len(decisions) == 3 * 4
    assert groupio("verify", store.path).code == 0
    assert "39" in groupio("ls", store.path).out


def test_it_grows_with_the_decisions(store: PosixBackend, template: Path) -> None:
    job = JobStore(store.path, "job", "node", WRITER)
    job.open((), create=False)
    assert len(entries_of(store)) == EPOCHS_MADE
    maker = StoreMaker(Path(store.path))
    for epoch in range(100, 164):
        job.forget(maker.commit(epoch, [{"a": b"x"}]))
    assert len(entries_of(store)) == EPOCHS_MADE + 64
    Path(store.path, EPOCHS, str(DecisionKey(1, 0, 1))).unlink()
    with StoreReader.open(store.path) as reader:
        assert reader.epochs()[0].epoch == 1
    job.close()
    maker.close()


def test_a_small_store_has_none(tmp_path: Path, groupio: Command) -> None:
    maker = StoreMaker(tmp_path / "small")
    maker.commit(1, [{"a": b"x"}])
    state_of(maker.backend)
    assert not maker.backend.exists(ROOT, CATALOGUE)
    maker.close()


def flip(store: PosixBackend) -> None:
    path = Path(store.path, CATALOGUE)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


def truncate(store: PosixBackend) -> None:
    os.truncate(Path(store.path, CATALOGUE), 100)


def empty(store: PosixBackend) -> None:
    os.truncate(Path(store.path, CATALOGUE), 0)


def sparse(store: PosixBackend) -> None:
    os.truncate(Path(store.path, CATALOGUE), 8 << 30)


def pipe(store: PosixBackend) -> None:
    path = Path(store.path, CATALOGUE)
    path.unlink()
    os.mkfifo(path)


def of_another_store(store: PosixBackend) -> None:
    data = encode_catalogue("f" * 32, entries_of(store))
    Path(store.path, CATALOGUE).write_bytes(data)


@pytest.mark.parametrize("harm", [flip, truncate, empty, sparse, pipe, of_another_store])
def test_one_of_no_use_is_reported_and_made_anew(
    store: PosixBackend, groupio: Command, harm: Callable[[PosixBackend], None]
) -> None:
    state = state_of(store)
    harm(store)
    with StoreReader.open(store.path) as reader:
        assert len(reader.epochs()) == EPOCHS_MADE - 1
    done = groupio("verify", store.path, "--json")
    assert done.code == 1
    (damage,) = done.json["damage"]
    assert (damage["path"], damage["epochs"]) == (f"{store.path}/{CATALOGUE}", [])
    assert state_of(store) == state
    assert groupio("verify", store.path).code == 0
    all_is_there(store)


def hidden(entries: list[Entry]) -> list[Entry]:
    """Most epochs are not told."""
    return entries[:3]


def invented(entries: list[Entry]) -> list[Entry]:
    """Epochs that were never decided."""
    content = entries[-1].content
    return [*entries, *(Entry(DecisionKey(1, epoch, 1), 7, content) for epoch in (50, 51))]


def of_other_files(entries: list[Entry]) -> list[Entry]:
    """As after a copy of the store, with other values."""
    wrong = entries[-1].content
    return [Entry(entry.key, entry.inode + 10**6, wrong) for entry in entries]


@pytest.mark.parametrize("change", [hidden, invented, of_other_files])
def test_an_old_one_and_one_that_invents_change_nothing(
    store: PosixBackend, groupio: Command, change: Callable[[list[Entry]], list[Entry]]
) -> None:
    state = state_of(store)
    listed = groupio("ls", store.path, "--json").json
    write(store, change(entries_of(store)))
    assert groupio("ls", store.path, "--json").json == listed
    assert groupio("verify", store.path).code == 0, "it says nothing of files that are there"
    assert state_of(store) == state
    all_is_there(store)


def commits_as_aborts(entries: list[Entry]) -> list[Entry]:
    return [Entry(entry.key, entry.inode) for entry in entries]


def aborts_as_commits(entries: list[Entry]) -> list[Entry]:
    content = entries[-1].content
    return [Entry(entry.key, entry.inode, entry.content or content) for entry in entries]


def other_content(entries: list[Entry]) -> list[Entry]:
    return [
        Entry(
            entry.key,
            entry.inode,
            entry.content
            and msgspec.structs.replace(
                entry.content, content_id=b"x" * 32, incarnation=1 << 60, write_id="other"
            ),
        )
        for entry in entries
    ]


@pytest.mark.parametrize("change", [commits_as_aborts, aborts_as_commits, other_content])
def test_one_that_lies_of_what_is_there_changes_nothing_that_counts(
    store: PosixBackend, groupio: Command, change: Callable[[list[Entry]], list[Entry]]
) -> None:
    state = state_of(store)
    write(store, change(entries_of(store)))
    lied = state_of(store)
    assert lied.incarnation == state.incarnation
    assert max(c.key for c in lied.committed) == max(c.key for c in state.committed)
    newest = {c.key: c for c in state.committed if c.key.epoch >= EPOCHS_MADE - 4}
    assert newest.items() <= {c.key: c for c in lied.committed}.items()
    all_is_there(store)
    done = groupio("verify", store.path, "--json")
    assert done.code == 1
    (damage,) = done.json["damage"]
    assert "what their records do not" in damage["detail"]
    Path(store.path, CATALOGUE).unlink()
    assert state_of(store) == state


def test_the_commit_before_a_rewind_is_read_from_its_file(store: PosixBackend) -> None:
    maker = StoreMaker(Path(store.path))
    maker.rewind(2, 1, 20)
    state_of(store)
    write(store, commits_as_aborts(entries_of(store)))
    assert DecisionKey(1, 20, 1) in {c.key for c in state_of(store).committed}
    maker.close()


def test_content_is_compared_with_the_record(
    store: PosixBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    state_of(store)
    write(store, other_content(entries_of(store)))
    job = JobStore(store.path, "job", "node", WRITER)
    job.open((), create=False)
    with StoreReader.open(store.path) as reader:
        content = reader.resolve(7).header.content_id

    class Effect:
        key, reports, world_size = DecisionKey(1, 7, 1), (), 1

    for given, same in ((content, True), (b"x" * 32, False)):
        monkeypatch.setattr(dedup, "content_id", lambda *_, given=given: given)
        assert job.compare(Effect()) is same  # type: ignore[arg-type]
    job.close()


def test_one_that_cannot_be_written_is_done_without(
    store: PosixBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise StorageError("the disk is read-only", path=store.path, errno=30)

    monkeypatch.setattr(PosixBackend, "replace", refuse)
    assert len(state_of(store).committed) == EPOCHS_MADE - 1
    assert not store.exists(ROOT, CATALOGUE)


def test_one_of_a_newer_release_is_left_alone(
    store: PosixBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = state_of(store)
    with monkeypatch.context() as newer:
        newer.setattr("groupio.format.envelope.RECORD_VERSION", RECORD_VERSION + 1)
        data = encode_catalogue(store.store_record().store_id, entries_of_none())
    store.replace(ROOT, CATALOGUE, data)
    assert state_of(store) == state
    assert Path(store.path, CATALOGUE).read_bytes() == data


def entries_of_none() -> list[Entry]:
    return [Entry(DecisionKey(1, 1, 1), 1)]


def test_an_unannounced_segment_in_use_is_kept(store: PosixBackend) -> None:
    """A decision was removed by hand, and the catalogue says that what refers to it is aborted."""
    maker = StoreMaker(Path(store.path))
    maker.commit(60, [{"a": b"shared"}])
    maker.commit(61, [{"a": b"shared"}])
    for epoch in range(62, 70):
        maker.commit(epoch, [{"a": b"%d" % epoch}])
    state_of(store)
    Path(store.path, EPOCHS, str(DecisionKey(1, 60, 1))).unlink()
    write(store, commits_as_aborts(entries_of(store)))
    state_of(store)
    with StoreReader.open(store.path) as reader:
        assert reader.read_items(reader.resolve(61), 0) == {"a": b"shared"}
    maker.close()
