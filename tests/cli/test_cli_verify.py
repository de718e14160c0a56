"""``verify`` finds what is damaged, says where, and lists the rest apart."""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
from cli_help import Command
from store_maker import StoreMaker, state

from groupio.backend.base import FOLDERS
from groupio.backend.posix import PosixBackend
from groupio.cli.catalog import read_catalog
from groupio.format.segment import SegmentReader
from groupio.model import DecisionKey

FIRST, SECOND = DecisionKey(1, 10, 1), DecisionKey(1, 20, 1)


def segment_path(maker: StoreMaker, key: DecisionKey) -> Path:
    return maker.path / "segments" / f"{key}-node-0000.seg"


def record_path(maker: StoreMaker, key: DecisionKey) -> Path:
    return maker.path / "epochs" / str(key)


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def damage_of(done: Any) -> list[tuple[str, str]]:
    assert done.code == (1 if done.json["damage"] else 0)
    assert done.json["ok"] is not bool(done.json["damage"])
    return [(d["kind"], Path(d["path"]).name) for d in done.json["damage"]]


def test_a_sound_store_is_ok(groupio: Command, maker: StoreMaker) -> None:
    done = groupio("verify", maker.path, "--json")
    assert done.code == 0
    assert done.json["ok"] is True
    assert done.json["epochs"] == [10, 20]
    assert done.json["segments"] == 2
    assert done.json["bytes_read"] == 0
    assert done.json["damage"] == done.json["leftovers"] == []
    full = groupio("verify", maker.path, "--read-data", "--json")
    assert full.code == 0
    assert full.json["bytes_read"] > 4 << 20
    text = groupio("verify", maker.path, "--read-data")
    assert text.code == 0
    assert "2 epochs, 2 segments" in text.out
    assert "ok" in text.out


def test_a_flipped_bit_of_data_is_located_by_chunk(groupio: Command, maker: StoreMaker) -> None:
    path = segment_path(maker, FIRST)
    flip(path, 5000)
    assert groupio("verify", maker.path).code == 0, "the structure does not read data"
    done = groupio("verify", maker.path, "--read-data", "--json")
    assert damage_of(done) == [("corrupt", path.name)]
    (damage,) = done.json["damage"]
    assert len(damage["chunk"]) == 64
    assert damage["epochs"] == [10, 20]
    text = groupio("verify", maker.path, "--read-data")
    assert text.code == 1
    assert damage["chunk"] in text.out
    assert "hurts epoch 10, 20" in text.out


def test_every_damaged_chunk_is_found(groupio: Command, maker: StoreMaker) -> None:
    path = segment_path(maker, FIRST)
    with PosixBackend.open(maker.path, create=False).reader("segments", path.name) as reader:
        index = SegmentReader(reader.read, reader.size, reader.path).index
    for offset in index.offsets[:3]:
        flip(path, int(offset))
    done = groupio("verify", maker.path, "--read-data", "--json")
    found = {d["chunk"] for d in done.json["damage"]}
    assert found == {digest.tobytes().hex() for digest in index.digests[:3]}


@pytest.mark.parametrize("seed", range(3))
def test_random_flips_are_all_found(groupio: Command, maker: StoreMaker, seed: int) -> None:
    chance = random.Random(seed)
    files = sorted(p for p in maker.path.rglob("*") if p.is_file())
    for _ in range(12):
        path = chance.choice(files)
        at = chance.randrange(path.stat().st_size)
        flip(path, at)
        done = groupio("verify", maker.path, "--read-data", "--json")
        assert done.code == 1, f"{path} at {at}"
        located = done.err if path.name == "groupio.json" else done.out
        assert path.name in located
        flip(path, at)
    assert groupio("verify", maker.path, "--read-data").code == 0


def test_missing_truncated_and_swapped_segments(groupio: Command, maker: StoreMaker) -> None:
    one, two = segment_path(maker, FIRST), segment_path(maker, SECOND)
    kept = one.read_bytes()
    one.unlink()
    done = groupio("verify", maker.path, "--json")
    assert damage_of(done) == [("missing", one.name)]
    assert done.json["damage"][0]["epochs"] == [10, 20]
    one.write_bytes(kept[:-100])
    assert damage_of(groupio("verify", maker.path, "--json")) == [("truncated", one.name)]
    one.write_bytes(kept + b"x")
    assert damage_of(groupio("verify", maker.path, "--json")) == [("corrupt", one.name)]
    # The larger one in the place of the smaller, and the other way round.
    one.write_bytes(two.read_bytes())
    assert damage_of(groupio("verify", maker.path, "--json"))[0][0] in {"swapped", "truncated"}
    one.write_bytes(kept)
    two.write_bytes(kept)
    assert damage_of(groupio("verify", maker.path, "--json")) == [("swapped", two.name)]


def test_missing_truncated_and_swapped_manifests(groupio: Command, maker: StoreMaker) -> None:
    one, two = record_path(maker, FIRST), record_path(maker, SECOND)
    kept, other = one.read_bytes(), two.read_bytes()
    one.write_bytes(kept[:-10])
    assert damage_of(groupio("verify", maker.path, "--json")) == [("truncated", one.name)]
    one.write_bytes(b"")
    assert damage_of(groupio("verify", maker.path, "--json")) == [("truncated", one.name)]
    one.write_bytes(other)
    assert damage_of(groupio("verify", maker.path, "--json")) == [("swapped", one.name)]
    one.unlink()
    done = groupio("verify", maker.path, "--json")
    assert damage_of(done) == [("missing", one.name)], "epoch 20 uses the segment of epoch 10"
    one.write_bytes(kept)
    two.unlink()
    assert damage_of(groupio("verify", maker.path, "--json")) == [("missing", two.name)]


def test_one_epoch_alone(groupio: Command, maker: StoreMaker) -> None:
    flip(segment_path(maker, SECOND), 5000)
    assert groupio("verify", maker.path, "10", "--read-data").code == 0
    assert groupio("verify", maker.path, "20", "--read-data").code == 1
    assert groupio("verify", maker.path, "latest", "--read-data").code == 1
    assert groupio("verify", maker.path, "11").code == 2
    flip(record_path(maker, FIRST), 200)
    assert damage_of(groupio("verify", maker.path, "10", "--json")) == [("corrupt", str(FIRST))]


def test_undecided_and_garbage_are_listed_apart(groupio: Command, maker: StoreMaker) -> None:
    flying, aborted = DecisionKey(1, 30, 1), DecisionKey(1, 40, 1)
    maker.announce(flying)
    whole = maker.segment(flying, [b"x" * 10])
    half = maker.segment(DecisionKey(1, 50, 1), [b"y" * 10])
    half.write_bytes(half.read_bytes()[:-1])
    maker.abort(aborted)
    refuse = maker.segment(aborted, [b"z" * 10])
    maker.announce(aborted)
    (maker.path / "epochs" / "README").write_text("not ours")
    (maker.path / "segments" / "core").write_text("not ours")
    done = groupio("verify", maker.path, "--json")
    assert done.code == 0
    found = {(x["state"], Path(x["path"]).relative_to(maker.path)) for x in done.json["leftovers"]}
    assert found == {
        ("undecided", Path("inflight") / str(flying)),
        ("undecided", whole.relative_to(maker.path)),
        ("undecided", half.relative_to(maker.path)),
        ("garbage", refuse.relative_to(maker.path)),
        ("garbage", Path("inflight") / str(aborted)),
        ("garbage", Path("epochs/README")),
        ("garbage", Path("segments/core")),
    }
    assert "undecided" in groupio("verify", maker.path).out


def test_parts_of_another_store_are_found(
    groupio: Command, maker: StoreMaker, tmp_path: Path
) -> None:
    other = StoreMaker(tmp_path / "other")
    try:
        other.commit(10, [state(0, 10), state(1, 10)])
    finally:
        other.close()
    shutil.copy(segment_path(other, FIRST), segment_path(maker, FIRST))
    done = groupio("verify", maker.path, "--json")
    assert damage_of(done) == [("inconsistent", segment_path(maker, FIRST).name)]
    assert "invariant 3" in done.json["damage"][0]["detail"]


def test_a_second_commit_of_an_epoch_is_found(groupio: Command, maker: StoreMaker) -> None:
    maker.commit(20, [state(0, 21)], attempt=2)
    done = groupio("verify", maker.path, "--json")
    assert done.code == 1
    assert {int(d["detail"][-2]) for d in done.json["damage"]} == {6, 7}


def test_an_aborted_attempt_whose_segment_is_in_use_is_found(
    groupio: Command, maker: StoreMaker
) -> None:
    record_path(maker, FIRST).unlink()
    maker.abort(FIRST)
    done = groupio("verify", maker.path, "--json")
    assert damage_of(done) == [("inconsistent", segment_path(maker, FIRST).name)]
    assert done.json["damage"][0]["epochs"] == [20]


def test_unreadable_is_not_missing(
    groupio: Command, maker: StoreMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    from groupio.errors import StorageError

    real = PosixBackend.reader

    def reader(self: PosixBackend, folder: str, name: str) -> Any:
        if folder == "segments" and name.startswith(str(FIRST)):
            raise StorageError("cannot read it: Input/output error", path=name, errno=5)
        return real(self, folder, name)

    monkeypatch.setattr(PosixBackend, "reader", reader)
    done = groupio("verify", maker.path, "--json")
    assert damage_of(done) == [("unreadable", segment_path(maker, FIRST).name)]


def test_catalog_counts_aborts(maker: StoreMaker) -> None:
    maker.abort(DecisionKey(1, 30, 1))
    catalog = read_catalog(maker.backend)
    assert catalog.decisions.aborted == [DecisionKey(1, 30, 1)]
    assert catalog.visible == {10: FIRST, 20: SECOND}


def test_unfinished_files_are_listed_and_removed_when_old(
    groupio: Command, maker: StoreMaker
) -> None:
    names = [".tmp-0123", *(f"{folder}/.tmp-0123" for folder in FOLDERS)]
    for name in names:
        (maker.path / name).write_bytes(b"torn")
    (maker.path / "dcp" / ".20.tmp-0123").mkdir(parents=True)
    (maker.path / "dcp" / ".20.tmp-0123" / ".metadata").write_bytes(b"torn")
    (maker.path / ".snapshot").mkdir()
    paths = {f"{maker.path}/{name}" for name in (*names, "dcp/.20.tmp-0123")}
    done = groupio("verify", maker.path, "--json")
    assert done.code == 0
    assert {row["path"] for row in done.json["leftovers"]} == paths
    assert {row["state"] for row in done.json["leftovers"]} == {"garbage"}
    assert maker.backend.remove_temporary(3600.0) == 0
    for path in paths:
        os.utime(path, (1, 1))
    assert maker.backend.remove_temporary(3600.0) == len(paths)
    assert groupio("verify", maker.path, "--json").json["leftovers"] == []
    assert (maker.path / ".snapshot").is_dir(), "it is none of ours"


def test_something_in_the_place_of_the_doors_stops_no_clearing(maker: StoreMaker) -> None:
    (maker.path / "dcp").write_bytes(b"a file")
    (maker.path / "epochs" / ".tmp-0123").touch()
    os.utime(maker.path / "epochs" / ".tmp-0123", (1, 1))
    assert maker.backend.remove_temporary(3600.0) == 1
