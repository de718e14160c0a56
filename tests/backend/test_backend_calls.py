"""The order of system calls on the commit path, and an error at each of them."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from backend_writer import acked, check, commit
from stracing import Call, calls, inject

from groupio.backend.base import EPOCHS, FOLDERS
from groupio.backend.posix import PosixBackend

pytestmark = pytest.mark.root  # attaching strace needs it on hardened kernels

WRITER = str(Path(__file__).parents[1] / "crash" / "backend_writer.py")


def writer(store: Path, first: int, count: int) -> list[str]:
    return [sys.executable, WRITER, str(store), str(first), str(count)]


def run(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60, check=False
    )


def events(found: list[Call], store: Path) -> list[str]:
    """What the calls did to the store, one word each, with temporary names made equal."""
    words = []
    for call in found:
        text = re.sub(r"\.tmp-[0-9a-f]+", "TMP", call.text).replace(str(store), "S")
        names = re.findall(r"<(S[^>]*)>", text) + re.findall(r'"([^"]*)"', text)
        if call.name.startswith(("fsync", "fdatasync")):
            words.append(f"fsync {names[0]}" if names else "fsync above")
        elif call.name.startswith(("link", "rename")):
            old, new = names[2:4] if len(names) == 4 else (names[-2], names[-1])
            words.append(f"{call.name[:4]} {names[0]}/{old} {names[1]}/{new}")
    return words


def test_order_of_a_commit(tmp_path: Path) -> None:
    store = tmp_path / "store"
    assert acked(run(writer(store, 1, 1)).stdout) == {1}
    done, found = calls(writer(store, 2, 1), tmp_path / "log")
    assert acked(done.stdout) == {2}
    key = "L00000001-E00000000000000000002-A000001"
    assert events(found, store) == [
        "fsync S",  # the store's record, whose maker might have died before this
        f"fsync S/segments/{key}-node-0000.seg",
        "fsync S/segments",
        "fsync S/prepared/TMP",
        f"rena S/prepared/TMP S/prepared/{key}",
        f"link S/prepared/{key} S/epochs/{key}",
        "fsync S/epochs",
    ]


def test_creation_flushes_every_directory_and_its_parents(tmp_path: Path) -> None:
    store = tmp_path / "a" / "b" / "store"
    _, found = calls(writer(store, 1, 0), tmp_path / "log")
    paths = [re.search(r"<(.*)>", call.text) for call in found if call.name == "fsync"]
    flushed = {path[1] for path in paths if path}
    folders = {str(store / name) for name in FOLDERS}
    assert folders <= flushed
    assert {str(store), str(store.parent), str(tmp_path / "a"), str(tmp_path)} <= flushed
    order = events(found, store)
    linked = next(i for i, word in enumerate(order) if word.startswith("link"))
    assert order[linked - 1] == "fsync S/TMP"
    assert order[linked + 1 :] == ["fsync S"]


ERRORS = {"openat": "EACCES", "pwrite64": "ENOSPC", "fsync": "EIO"}


def test_an_error_at_each_call_is_typed_and_harmless(tmp_path: Path) -> None:
    log = tmp_path / "log"
    _, found = calls(writer(tmp_path / "first", 1, 1), log)
    skip = ("close", "fcntl")  # their errors have tests of their own or change nothing
    vital = [call for call in found if call.name not in skip]
    assert len(vital) > 20
    for number, call in enumerate(vital[number] for number in range(0, len(vital), 5)):
        store = tmp_path / f"store{number}"
        action = "error=" + ERRORS.get(call.name, "EIO")
        done = inject(writer(store, 1, 1), log, call, action)
        context = (call, done.stdout, done.stderr)
        assert done.returncode in (0, 3), context
        left = check(store)
        assert left >= acked(done.stdout), context
        answer = json.loads(done.stdout.splitlines()[-1])
        if answer.get("outcome") == "not_committed":
            assert left == set(), context
        # Whatever was left behind, the next process finds or makes one decision.
        with PosixBackend.open(store, create=True) as backend:
            backend.ensure_store_record("job")
            assert commit(backend, 2), context
        assert check(store) == left | {2}, context


@pytest.mark.parametrize("number", [1, 2])
def test_interrupted_calls_are_repeated(tmp_path: Path, number: int) -> None:
    store = tmp_path / "store"
    call = Call("fsync", number, "")
    done = inject(writer(store, 1, 1), tmp_path / "log", call, "error=EINTR")
    assert acked(done.stdout) == {1}
    with PosixBackend.open(store, create=False) as backend:
        assert len(backend.list(EPOCHS)) == 1
