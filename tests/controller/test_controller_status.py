"""What a controller and an agent say of their jobs when somebody asks for the status."""

from __future__ import annotations

import asyncio
import errno
import time
from typing import Any

import numpy as np
import pytest

from groupio.agent import survey
from groupio.agent.survey import Survey
from groupio.controller.away import Away
from groupio.errors import StorageError
from groupio.model import ChunkTable, MemberTable, NodeReport
from groupio.protocol import events as ev
from groupio.protocol.controller import Controller


class Groups:
    """A controller, as far as its store's absence is concerned."""

    def __init__(self, *away: StorageError | None) -> None:
        self.groups = {n: type("Group", (), {"away": error}) for n, error in enumerate(away)}


def failed(number: int) -> StorageError:
    return StorageError("no answer", path="/s", errno=number)


def test_a_store_is_away_from_the_first_failure_until_something_succeeds() -> None:
    away, controller = Away(), Controller(iter(range(9)))
    assert away.describe(0.0) is None
    away.note(ev.StoreUnavailable(failed(errno.ENOSPC)), controller)
    assert away.since is None  # it is there, and full
    away.note(ev.StoreUnavailable(failed(errno.ESTALE)), controller)
    since = away.since
    assert since is not None
    away.note(ev.StoreUnavailable(failed(errno.ETIMEDOUT)), controller)
    assert away.describe(since + 5) == {"for_s": 5.0, "error": "no answer"}
    state = ev.StoreState((), (), (), 0, False, "j", "id")
    away.note(ev.StoreOpened(state), controller)
    assert away.describe(0.0) is None


def test_a_group_that_retries_says_so_too() -> None:
    away: Any = Away()
    away.note(ev.Drain(), Groups(None, failed(errno.EHOSTDOWN)))
    assert away.error == "no answer"
    away.note(ev.Drain(), Groups(None, None))
    assert away.since is None


def test_a_group_of_one_node_that_waits_says_so_too() -> None:
    away, controller = Away(), Controller()
    member = ev.MemberOpened(
        node="n0",
        client="c",
        process=ev.Process(1, 1),
        rank=0,
        world_size=1,
        save_id=1,
        epoch=1,
        deadline_s=60.0,
        elapsed_s=0.0,
        at=0.0,
        total_bytes=0,
        bytes_logical=0,
        items_id=b"",
    )
    none = np.empty(0, np.int64)
    chunks = ChunkTable(np.empty((0, 32), np.uint8), none, none.astype(np.int32), none)
    report = NodeReport("n0", (), chunks, (MemberTable(0, (), b"", none, 0),))
    for event, is_away in (
        (member, False),
        (ev.StoreOpened(ev.StoreState("job", (), (), (), 0)), False),
        (ev.NodeAdmitted(1, "n0"), False),
        (ev.InflightPublished(1), False),
        (ev.MemberCopied(1, 0, "n0"), False),
        (ev.NodeStored(1, "n0", report), False),
        (ev.Prepared(1, error=failed(errno.ESTALE)), True),
        (ev.TimerFired("away-1"), True),
        (ev.Prepared(1, b"id"), False),
        (ev.Decided(1, False, False, failed(errno.ESTALE)), True),
        (ev.TimerFired("away-1"), True),
        (ev.Decided(1, True, True), False),
    ):
        controller.handle(event)
        away.note(event, controller)
        assert (away.since is not None) == is_away, event


class Elsewhere:
    """A job whose controller is on another node."""

    host = None

    def __init__(self, answers: bool, body: dict[str, Any] | None = None) -> None:
        self.joining = self
        self._answers, self._body = answers, body

    def describe(self, number: int, answer: Any) -> bool:
        if self._answers and self._body is not None:
            loop = asyncio.get_running_loop()
            loop.call_soon(answer, self._body)
            loop.call_later(0.01, answer, {"groups": ["too late"]})
        return self._answers


def look(monkeypatch: pytest.MonkeyPatch, *jobs: Elsewhere) -> list[dict[str, Any]]:
    """The answers that a survey of these jobs gives."""
    own = {"jobs": [{"job": f"j{n}", "joined": True, "groups": []} for n in range(len(jobs))]}
    monkeypatch.setattr(survey, "status", lambda driver: own)
    monkeypatch.setattr(survey, "ANSWER_S", 0.2)
    answers: list[dict[str, Any]] = []

    async def ask() -> None:
        driver: Any = type("Driver", (), {"jobs": dict(enumerate(jobs))})
        Survey(driver, answers.append)
        began = time.monotonic()
        while time.monotonic() < began + 0.4:
            await asyncio.sleep(0.01)

    asyncio.run(ask())
    return answers


def test_controllers_elsewhere_are_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    body = {"nodes": ["n0"], "groups": [{"epoch": 1}], "joined": False}
    jobs = (Elsewhere(True, body), Elsewhere(True, body | {"groups": []}))
    (answer,) = look(monkeypatch, *jobs)
    first, second = answer["jobs"]
    assert (first["job"], first["nodes"], first["groups"]) == ("j0", ["n0"], [{"epoch": 1}])
    assert first["joined"] is True
    assert (second["job"], second["groups"]) == ("j1", [])


def test_one_that_is_silent_or_not_found_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    (answer,) = look(monkeypatch, Elsewhere(True), Elsewhere(False))
    assert [job["groups"] for job in answer["jobs"]] == [[], []]
    (answer,) = look(monkeypatch, Elsewhere(False))
    assert answer["jobs"][0]["job"] == "j0"
    (answer,) = look(monkeypatch)
    assert answer["jobs"] == []
