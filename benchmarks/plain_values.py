"""Measures states of a million plain values: ``python benchmarks/plain_values.py --json FILE``.

Each state is saved and loaded by a process of its own, ``--tries`` times, by each of three ways:
``core`` (:meth:`groupio.Client.save`), ``torch`` (:func:`groupio.torch.save`) and ``dcp``
(:class:`groupio.torch.GroupStorageWriter` with ``GroupSavePlanner``). The figures are the fastest
of the tries: the seconds of the call, and in brackets those of processor time of its process.

``save``      the call of save (for ``dcp`` it returns when the epoch is DURABLE)
``load``      into a state dict of ``{"state": None}`` (for ``dcp`` there is no such load)
``template``  into a state of the same form
``stock``     for ``dcp``: ``dcp.save`` with the ``FileSystemWriter`` of torch, to compare with
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

WAIT_S = 600.0

STATES: dict[str, Callable[[int], Any]] = {
    "ints": lambda n: list(range(n)),
    "pairs": lambda n: [[i, i * 0.5] for i in range(n)],
    "tuples": lambda n: [(i, i * 0.5) for i in range(n)],
    "dicts": lambda n: [{"id": i, "loss": i * 0.5} for i in range(n // 2)],
    "names": lambda n: {f"key{i}": i for i in range(n)},
}

WAYS = ("core", "torch", "dcp")


def blank(value: Any) -> Any:
    """A state of the same form with other values."""
    if isinstance(value, dict):
        return {key: blank(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(blank, value))
    return 0


def seconds(work: Callable[[], Any]) -> tuple[float, float]:
    """The seconds that ``work`` takes, and those of processor time of this process."""
    began, used = time.monotonic(), time.process_time()
    work()
    return time.monotonic() - began, time.process_time() - used


def by_core(value: Any, store: str) -> dict[str, tuple[float, float]]:
    """Through the client."""
    import groupio

    client = groupio.connect(store, rank=0, world_size=1)
    found = {
        "save": seconds(lambda: client.save({"state": value}, epoch=1).wait("durable", WAIT_S))
    }
    loaded: dict[str, Any] = {}
    found["load"] = seconds(lambda: loaded.update(client.load(1)))
    assert loaded["state"] == value
    client.close()
    return found


def by_torch(value: Any, store: str) -> dict[str, tuple[float, float]]:
    """Through the state dicts of torch."""
    import groupio.torch as gt

    gt.save({"first": 1}, store, step=0).wait("durable", WAIT_S)
    handles: list[Any] = []
    found = {"save": seconds(lambda: handles.append(gt.save({"state": value}, store, step=1)))}
    handles[0].wait("durable", WAIT_S)
    loaded: dict[str, Any] = {"state": None}
    found["load"] = seconds(lambda: gt.load(loaded, store, step=1))
    assert loaded["state"] == value
    loaded = {"state": blank(value)}
    found["template"] = seconds(lambda: gt.load(loaded, store, step=1))
    assert loaded["state"] == value
    return found


def by_dcp(value: Any, store: str) -> dict[str, tuple[float, float]]:
    """Through torch.distributed.checkpoint."""
    import torch.distributed.checkpoint as dcp

    import groupio.torch as gt

    state = {"state": value}
    found: dict[str, tuple[float, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        found["stock"] = seconds(
            lambda: dcp.save(state, storage_writer=dcp.FileSystemWriter(folder), no_dist=True)
        )
    writer = gt.GroupStorageWriter(store)
    planner = gt.GroupSavePlanner()
    found["save"] = seconds(
        lambda: dcp.save(state, checkpoint_id="1", storage_writer=writer, planner=planner)
    )
    loaded = {"state": blank(value)}
    reader = gt.GroupStorageReader(store)
    found["template"] = seconds(lambda: dcp.load(loaded, checkpoint_id="1", storage_reader=reader))
    assert loaded["state"] == value
    return found


def run_alone(*words: str) -> Any:
    """What this script prints, called with these words in a process of its own."""
    with tempfile.TemporaryDirectory() as runtime:
        environ = os.environ | {"GROUPIO_RUNTIME_DIR": runtime, "GROUPIO_IDLE_S": "0.1"}
        command = [sys.executable, __file__, *words]
        out = subprocess.run(command, env=environ, capture_output=True, text=True, check=True)
        return json.loads(out.stdout)


def main() -> None:
    """Measure, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--values", type=int, default=1_000_000)
    parser.add_argument("--states", nargs="+", choices=list(STATES), default=list(STATES))
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--tries", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        value = STATES[options.states[0]](options.values)
        by = {"core": by_core, "torch": by_torch, "dcp": by_dcp}[options.ways[0]]
        with tempfile.TemporaryDirectory() as folder:
            print(json.dumps(by(value, f"{folder}/store")))
        return
    report: dict[str, Any] = {"machine": platform.platform(), "cpus": os.cpu_count()}
    report["values"] = options.values
    for state in options.states:
        for way in options.ways:
            words = ("--one", "--values", str(options.values), "--states", state, "--ways", way)
            tries = [run_alone(*words) for _ in range(options.tries)]
            best = {
                name: [round(min(one[name][which] for one in tries), 2) for which in (0, 1)]
                for name in tries[0]
            }
            report.setdefault(state, {})[way] = best
            shown = ", ".join(f"{name} {wall} s ({cpu})" for name, (wall, cpu) in best.items())
            print(f"{state:>8} {way:>6}: {shown}", flush=True)
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
