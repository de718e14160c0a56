"""Something else in the place of one file of a store: a finding, and the rest is shown."""

from __future__ import annotations

import json
import os
import shutil
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cli_help import Command
from store_maker import StoreMaker

from groupio.agent.identity import Writer
from groupio.client.store_reader import StoreReader
from groupio.controller.recovery import recover
from groupio.door.publish import make_door
from groupio.errors import GroupIOError
from groupio.format.records import ControllerRecord, encode_controller
from groupio.model import DecisionKey

MEMORY_BYTES = 96 << 20
"""No command may take more for a store of two small epochs, whatever is in it."""

SPARSE_BYTES = 8 << 30


def sparse(path: Path, size: int = SPARSE_BYTES) -> None:
    path.touch()
    os.truncate(path, size)


KINDS: dict[str, Callable[[Path], object]] = {
    "brackets": lambda path: path.write_bytes(b"[" * 200_000),
    "objects": lambda path: path.write_bytes(b'{"a":' * 200_000),
    "unknown": lambda path: path.write_bytes(b'{"x":' + b"[" * 200_000),
    "text": lambda path: path.write_bytes(b'{"schema": "\xff\xfe"}'),
    "empty": lambda path: path.touch(),
    "sparse": sparse,
    "16 MiB": lambda path: path.write_bytes(b"[" * (16 << 20)),
    "pipe": os.mkfifo,
    "directory": os.mkdir,
    "device": lambda path: path.symlink_to("/dev/zero"),
    "loop": lambda path: path.symlink_to(path),
}

FILES = {
    "door": "dcp/20/groupio.json",
    "metadata": "dcp/20/.metadata",
    "values": "dcp/20/__values.bin",
    "inflight": f"inflight/{DecisionKey(1, 30, 1)}",
    "prepared": f"prepared/{DecisionKey(1, 30, 1)}",
    "controller": "controllers/00000001",
    "segment": f"segments/{DecisionKey(1, 20, 1)}-node-0000.seg",
    "decision": f"epochs/{DecisionKey(1, 20, 1)}",
    "abort": f"epochs/{DecisionKey(1, 15, 1)}",
    "lineage": "lineages/00000002",
    "record": "groupio.json",
}


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    made = StoreMaker(tmp_path_factory.mktemp("hostile") / "store")
    made.commit(10, [{"a": b"ten", "n": 10}])
    made.commit(20, [{"a": b"twenty", "n": 20}])
    made.abort(DecisionKey(1, 15, 1))
    made.rewind(2, 1, 20)
    made.announce(DecisionKey(1, 30, 1))
    made.backend.put("prepared", str(DecisionKey(1, 30, 1)), b"torn", durable=False)
    term = encode_controller(ControllerRecord(1, "tcp://[::1]:1", "node", "0" * 32, 1.7e9))
    made.backend.put("controllers", "00000001", term, durable=False)
    with StoreReader.open(made.path) as reader:
        make_door(reader, reader.resolve(20))
    yield made.path
    made.close()


@pytest.fixture
def store(template: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(template, tmp_path / "store"))


def _cases() -> Iterator[Any]:
    for which in FILES:
        for kind in KINDS:
            quick = which in ("door", "record") or kind in ("sparse", "pipe", "directory")
            marks = () if quick else pytest.mark.proof
            yield pytest.param(which, kind, id=f"{which}-{kind}", marks=marks)


@pytest.mark.parametrize(("which", "kind"), [*_cases()])
def test_one_finding_and_the_rest_is_shown(
    groupio: Command, store: Path, which: str, kind: str
) -> None:
    path = store / FILES[which]
    path.unlink()
    KINDS[kind](path)
    if kind in ("sparse", "16 MiB"):
        tracemalloc.start()
    try:
        listed = groupio("ls", store, "--json")
        shown = groupio("show", store, "10", "--json")
        checked = groupio("verify", store, "--json")
        read = _read(store)
        _recover(store)
        used = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert used < MEMORY_BYTES
    for done in (listed, shown, checked):
        assert done.code in (0, 1, 2)
        assert done.err.count("\n") == (done.code == 2 or not done.out)
    if which == "record":
        assert (listed.code, checked.code) != (0, 0)
        return
    epochs = [row["epoch"] for row in listed.json["epochs"]]
    assert epochs == ([10] if which == "decision" else [10, 20])
    assert shown.json["epoch"]["epoch"] == 10
    hurt = [row for row in checked.json["damage"] if row["path"].startswith(str(path))]
    if which in ("inflight", "prepared", "controller"):
        assert checked.code == 0
    elif which == "door" and kind == "directory":
        assert [row["path"] for row in checked.json["damage"]] == [str(path.parent)]
    elif which != "segment":
        assert len(checked.json["damage"]) >= 1
        assert hurt or str(path) in json.dumps(checked.json["damage"])
    if which != "lineage":
        assert read == epochs


def _read(store: Path) -> list[int]:
    """What a program that opens the store sees; only errors of groupio may come out."""
    try:
        with StoreReader.open(store) as reader:
            epochs = [info.epoch for info in reader.epochs()]
            assert reader.read_items(reader.resolve(10), 0)["n"] == 10
            return epochs
    except GroupIOError:
        return []


def _recover(store: Path) -> None:
    """A controller that begins: it decides, or refuses with an error of groupio."""
    try:
        with StoreReader.open(store) as reader:
            recover(reader.backend, Writer("boot", 1, 1, "host"), "job", frozenset(), fence=True)
    except GroupIOError:
        pass


NAMES = [b"\xff\xfe", "\u0661\u0662".encode(), b"x\ny", b"00000003 ", b"\x1b[31m", b"L1-E1-A1"]


@pytest.mark.parametrize("name", NAMES)
def test_names_of_other_programs(groupio: Command, store: Path, name: bytes) -> None:
    for folder in ("epochs", "lineages", "prepared", "inflight", "segments", "controllers", "dcp"):
        (store / folder / os.fsdecode(name)).write_bytes(b"[" * 1000)
    for command in (["ls"], ["show", "10"], ["verify"]):
        for flags in ([], ["--json"]):
            done = groupio(command[0], store, *command[1:], *flags)
            assert done.code == 0, done
            assert "\x1b[31m" not in done.out.replace("\x1b[31m\x1b", "")
            assert not done.err
    _recover(store)
    assert _read(store) == [10, 20]


def test_a_store_whose_path_is_not_utf_8(groupio: Command, template: Path, tmp_path: Path) -> None:
    """Commands read it, in text and in JSON; only a client refuses it."""
    path = Path(shutil.copytree(template, tmp_path / os.fsdecode(b"s\xff")))
    for command in (["ls"], ["show", "10"], ["verify"]):
        for flags in ([], ["--json"]):
            done = groupio(command[0], path, *command[1:], *flags)
            assert (done.code, done.err) == (0, "")
            done.out.encode()
    done = groupio("ls", path / "absent")
    assert done.code == 2
    done.err.encode()
