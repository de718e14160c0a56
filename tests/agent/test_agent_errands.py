"""A job's thread for blocking calls: who is answered, and that it outlives every error."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from groupio.agent import errands
from groupio.agent.errands import Errands
from groupio.errors import GroupIOError, InvalidInput


class Loop:
    """Runs what is posted when the test says so."""

    def __init__(self) -> None:
        self.posted: queue.Queue[Callable[[], None]] = queue.Queue()
        self.heard: list[tuple[Any, GroupIOError | None]] = []
        self.it = Errands(self, "/store")  # type: ignore[arg-type]

    def post(self, step: Callable[[], None]) -> None:
        self.posted.put(step)

    def step(self) -> None:
        self.posted.get(timeout=20)()

    def answer(self, result: Any, error: GroupIOError | None) -> None:
        self.heard.append((result, error))


@pytest.fixture
def loop() -> Iterator[Loop]:
    made = Loop()
    yield made
    made.it.end()


@pytest.fixture
def said() -> Iterator[list[str]]:
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    errands.log.addHandler(handler)
    yield lines
    errands.log.removeHandler(handler)


def test_questions_are_answered_in_order_by_one_thread(loop: Loop) -> None:
    threads = []

    def question(number: int) -> int:
        threads.append(threading.current_thread())
        return number

    for number in range(5):
        loop.it.ask(lambda n=number: question(n), loop.answer)  # type: ignore[misc]
    for _ in range(5):
        loop.step()
    assert loop.heard == [(number, None) for number in range(5)]
    assert len(set(threads)) == 1
    assert threads[0] is not threading.current_thread()


def test_errors_are_answers(loop: Loop, said: list[str]) -> None:
    def fails(error: Exception) -> Callable[[], None]:
        def question() -> None:
            raise error

        return question

    why = InvalidInput("no")
    loop.it.ask(fails(why), loop.answer)
    loop.it.ask(fails(RuntimeError("a defect")), loop.answer)
    loop.step()
    loop.step()
    assert loop.heard[0] == (None, why)
    result, error = loop.heard[1]
    assert result is None
    assert type(error) is GroupIOError
    assert "a defect" in error.message
    assert said == ["asking for the controller of /store failed"]


def test_errors_of_tasks_are_logged(loop: Loop, said: list[str]) -> None:
    done = threading.Event()
    loop.it.run(lambda: 1 // 0)
    loop.it.run(done.set)
    assert done.wait(20)
    assert said == ["a task of /store failed"]


def test_nobody_is_answered_after_the_job_was_left(loop: Loop) -> None:
    free, asked = threading.Event(), threading.Event()

    def slow() -> None:
        asked.set()
        assert free.wait(20)

    loop.it.ask(slow, loop.answer)
    assert asked.wait(20)
    loop.it.leave()
    loop.it.ask(lambda: loop.heard.append((1, None)), loop.answer)
    done: list[int] = []
    loop.it.run(lambda: done.append(1))
    free.set()
    loop.step()
    loop.it.end()
    assert loop.heard == []
    assert done == [1], "what has to be put in order still is"
    loop.it.ask(lambda: None, loop.answer)  # no thread is needed to ask nobody
