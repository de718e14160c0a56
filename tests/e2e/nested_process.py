"""Ranks whose signal handlers save and load while a call is under way. What happened is printed.

``alone STORE SEED SECONDS`` and ``dcp STORE SEED SECONDS`` make their own signals, ``pair STORE
RANK TRIALS API`` gets them.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import random
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

import numpy as np

import groupio
from groupio.client.nested_saves import NOTE

OUTER = 5


class Storm:
    """SIGUSR1 at random moments, from a process of its own; ``handle`` runs in the main thread."""

    def __init__(self, seed: int, longest_s: float, handle: Callable[[], Any]) -> None:
        self.slowest_s = 0.0
        self.handled = 0
        self.errors: list[str] = []
        self._handle = handle
        self._random = random.Random(seed)
        self._longest_s = longest_s
        self._ended = threading.Event()
        signal.signal(signal.SIGUSR1, self._on_signal)
        self._thread = threading.Thread(target=self._send, daemon=True)
        self._thread.start()

    def _send(self) -> None:
        main = threading.main_thread().ident
        sent = 0
        while not self._ended.wait(self._random.random() * self._longest_s):
            # The interrupted call has to go on between two handlers.
            if self.handled == sent:
                sent += 1
                signal.pthread_kill(main, signal.SIGUSR1)

    def _on_signal(self, number: int, frame: Any) -> None:
        began = time.monotonic()
        try:
            self._handle()
        except BaseException as error:  # noqa: BLE001  the test is told
            self.errors.append("".join(traceback.format_exception(error, limit=-12)))
        self.slowest_s = max(self.slowest_s, time.monotonic() - began)
        self.handled += 1

    def end(self) -> None:
        self._ended.set()
        self._thread.join()


def outcome(handle: groupio.SaveHandle) -> str:
    try:
        handle.wait("durable", timeout_s=60)
    except groupio.GroupIOError as error:
        return type(error).__name__
    return "durable"


def alone(store: str, seed: int, seconds: float) -> dict[str, Any]:
    """One rank: its handlers save in any of its calls."""
    client = groupio.connect(store)
    state = {"w": np.zeros(1 << 20, np.uint8), "n": 1}
    epoch, handles, nested = 0, [], []

    def in_handler() -> None:
        if not epoch:
            return
        other = {"w": np.full(200_000, len(nested) % 251, np.uint8)}
        mine = (epoch * 1000) + 500 + len(nested) % 400
        nested.append(client.save(other, epoch=mine, wait_for="durable"))
        other["w"][:] = 255  # what was handed over is a copy
        with contextlib.suppress(groupio.NotFound):
            random.choice([client.epochs, lambda: client.load("latest"), lambda: None])()

    storm = Storm(seed, 0.05, in_handler)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        epoch += 1
        state["w"][:] = epoch % 251
        handles.append(client.save(state, epoch=epoch * 1000))
        if epoch % 2:
            outcome(handles[-1])
        else:
            client.load()
    storm.end()
    found = {
        "signals": storm.handled,
        "errors": storm.errors,
        "slowest_s": storm.slowest_s,
        "outer": [outcome(handle) for handle in handles],
        "nested": [outcome(handle) for handle in nested],
        "interrupting": sum(NOTE in handle.times.notes for handle in nested),
    }
    good = {e.epoch for e in client.epochs()}
    for handle in nested:
        if handle.error is None:
            assert handle.epoch in good
    client.close()
    return found


def dcp_alone(store: str, seed: int, seconds: float) -> dict[str, Any]:
    """One process: handlers call ``dcp.save`` with the writer of the call that they interrupt."""
    import torch
    import torch.distributed.checkpoint as dcp

    import groupio.torch as gt

    writer = gt.GroupStorageWriter(store, no_dist=True)
    state = {"w": torch.zeros(1 << 16), "n": 0}
    epoch, saved, told = 0, {}, []

    def save(number: int, value: dict[str, Any]) -> str:
        try:
            dcp.save(value, checkpoint_id=f"step-{number}", storage_writer=writer, no_dist=True)
        except dcp.api.CheckpointException as failed:
            return type(failed.failures[0][0]).__name__
        saved[number] = value["n"]
        return "durable"

    def in_handler() -> None:
        if epoch:
            mine = epoch * 1000 + 500 + len(told) % 400
            told.append(save(mine, {"w": torch.ones(100_000), "n": -mine}))

    outer = [save(1, dict(state))]  # what waits in a handler cannot wait for the first connection
    storm = Storm(seed, 0.2, in_handler)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        epoch += 1
        state["n"] = epoch * 1000
        outer.append(save(epoch * 1000, dict(state)))
    storm.end()
    reader = gt.GroupStorageReader(store)
    for number, value in saved.items():
        loaded = {"n": 0}
        dcp.load(loaded, checkpoint_id=f"step-{number}", storage_reader=reader, no_dist=True)
        assert loaded["n"] == value, (number, value, loaded)
    gt.close()
    return {
        "errors": storm.errors,
        "slowest_s": storm.slowest_s,
        "outer": outer,
        "nested": told,
    }


def pair(store: str, rank: int, trials: int, api: str) -> dict[str, Any]:
    """One of two ranks. In each trial both save OUTER epochs, and get a signal some time."""
    if api == "torch":
        import torch

        import groupio.torch as gt

        def save(epoch: int, value: int) -> groupio.SaveHandle:
            state = {"w": torch.full((1 << 20,), value % 251, dtype=torch.uint8), "n": epoch}
            return gt.save(state, store, step=epoch, dcp_door=False)
    else:
        client = groupio.connect(store, rank=rank, world_size=2)

        def save(epoch: int, value: int) -> groupio.SaveHandle:
            return client.save({"w": np.full(1 << 20, value % 251, np.uint8)}, epoch=epoch)

    outer: list[groupio.SaveHandle] = []
    nested: list[groupio.SaveHandle] = []
    slowest_s = 0.0

    def on_signal(number: int, frame: Any) -> None:
        nonlocal slowest_s
        began = time.monotonic()
        trial = len(nested) + 1
        nested.append(save(trial * 1000 + 500, rank + trial))
        slowest_s = max(slowest_s, time.monotonic() - began)

    signal.signal(signal.SIGUSR1, on_signal)
    for trial in range(1, trials + 1):
        print("trial", flush=True)
        for number in range(OUTER):
            outer.append(save(trial * 1000 + number, rank + number))
        while len(nested) < trial:
            time.sleep(0.001)
        outcome(nested[-1])
    found = {
        "slowest_s": slowest_s,
        "outer": [outcome(handle) for handle in outer],
        "nested": [outcome(handle) for handle in nested],
        "interrupting": sum(NOTE in handle.times.notes for handle in nested),
    }
    if api == "torch":
        gt.close()
    else:
        client.close()
    return found


def main() -> None:
    faulthandler.dump_traceback_later(90, exit=True)
    if sys.argv[1] in ("alone", "dcp"):
        store, seed, seconds = sys.argv[2], int(sys.argv[3]), float(sys.argv[4])
        random.seed(seed)
        found = (alone if sys.argv[1] == "alone" else dcp_alone)(store, seed, seconds)
    else:
        found = pair(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), sys.argv[5])
    print(json.dumps(found), flush=True)


main()
