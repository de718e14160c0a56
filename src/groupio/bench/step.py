"""One rank of ``groupio bench step``: a training loop that saves every step in the background."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import torch

import groupio.torch
from groupio.bench.news import News
from groupio.bench.options import Options
from groupio.bench.place import Place
from groupio.bench.save import rotated
from groupio.bench.state import Content, State
from groupio.bench.system import open_system
from groupio.bench.with_dcp import DcpAsync
from groupio.bench.with_groupio import WithDoor

_WARM_UP = 100
STEPS = 4
"""Steps of one block; the first of each is not counted."""


def train(options: Options, place: Place, news: News) -> None:
    """Blocks of steps: without saving, then with each system, ``epochs`` times in turn."""
    state = State(Content(options), place.rank)
    state.fill(1)
    work = _Work(options.step_s, place)
    savers = _savers(options, place)
    number = 0
    for turn in range(options.epochs):
        for name in rotated(list(savers), turn):
            saver = savers[name]
            if place.rank == 0:
                news.tell("begins", system=name, epoch=turn + 1)
            for step in range(STEPS):
                number += 1
                start = place.start()
                work.do()
                _update(state.region, number)
                place.barrier()  # the gradients of a real step make all ranks wait here, too
                saver.save(state, number)
                place.barrier()
                seconds = time.monotonic() - start
                if step:
                    news.tell("stepped", system=name, epoch=number, step_s=seconds)
            saver.finish()
            place.barrier()
    for saver in savers.values():
        saver.close()


class _Work:
    """Matrix products that take about ``seconds`` while all ranks compute, on one CPU each.

    So one rank leaves the other CPUs free, and as many ranks as CPUs leave none.
    """

    def __init__(self, seconds: float, place: Place) -> None:
        torch.set_num_threads(1)
        self._matrix = torch.full((384, 384), 1e-3, device="cpu")
        self._times = _WARM_UP
        self.do()  # the first products are slower
        place.start()
        begin = time.monotonic()
        self.do()
        each = place.largest(time.monotonic() - begin) / _WARM_UP
        self._times = max(1, round(seconds / each))

    def do(self) -> None:
        for _ in range(self._times):
            torch.mm(self._matrix, self._matrix)


def _update(region: np.ndarray[Any, Any], number: int) -> None:
    """Change every page, as an optimizer does."""
    region[::512] += np.uint8(number % 251 + 1)


class _Nothing:
    """Does not save: the baseline."""

    def save(self, state: State, number: int) -> None:
        return

    def finish(self) -> None:
        return

    def close(self) -> None:
        return


class _Groupio(_Nothing):
    """groupio bounds the number of saves in flight itself."""

    def __init__(self, system: WithDoor) -> None:
        self._system = system
        self._handles: deque[Any] = deque()

    def save(self, state: State, number: int) -> None:
        self._handles.append(self._system.begin(state, number))

    def finish(self) -> None:
        while self._handles:
            self._handles.popleft().wait("durable", timeout_s=self._system.timeout_s)

    def close(self) -> None:
        groupio.torch.close()


class _Async(_Nothing):
    """``dcp.async_save`` allows one at a time: wait for the last before the next."""

    def __init__(self, system: DcpAsync) -> None:
        self._system = system
        self._future: Future[Any] | None = None
        self._number = 0

    def save(self, state: State, number: int) -> None:
        self.finish()
        self._future, self._number = self._system.begin(state, number), number

    def finish(self) -> None:
        if self._future is not None:
            self._future.result(self._system.timeout_s)
            self._system.place.barrier()
            if self._system.place.rank == 0:
                self._system.forget(self._number)
            self._future = None


def _savers(options: Options, place: Place) -> dict[str, _Nothing]:
    folder = Path(options.folder)
    made: dict[str, _Nothing] = {"none": _Nothing()}
    wraps: dict[type[Any], Callable[[Any], _Nothing]] = {WithDoor: _Groupio, DcpAsync: _Async}
    for name in options.systems:
        system = open_system(name, folder, place, options.timeout_s)
        made[name] = next(wrap for kind, wrap in wraps.items() if isinstance(system, kind))(system)
    return made
