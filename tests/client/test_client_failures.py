"""A failed save whose handle is never looked at: it is reported, once, wherever logging goes."""

from __future__ import annotations

import logging
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
from fake_agent import Background, FakeAgent

import groupio
from groupio.client import failures
from groupio.protocol import messages as msg

Connect = Callable[..., groupio.Client]
STALE = groupio.StaleEpoch("epoch 1 is not newer than 9; save a newer one", epoch=1, latest=9)
ITEMS = {"a": b"x" * 100}


def failing_save(
    client: groupio.Client, peer: object, background: Background, epoch: int
) -> groupio.SaveHandle:
    saved = background.submit(client.save, ITEMS, epoch=epoch)
    opened = peer.take(msg.OpenSave)
    peer.fail(opened, STALE)
    handle = saved.result(20)
    peer.take(msg.Released)
    return handle


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


def test_an_unread_failure_is_logged_once_noted_once_and_summed_up(
    agent: FakeAgent, connect: Connect, background: Background, caplog: pytest.LogCaptureFixture
) -> None:
    client = connect()
    peer = agent.peer()
    failing_save(client, peer, background, 1)
    assert not lines(caplog)
    saved = background.submit(client.save, ITEMS, epoch=10)
    opened = peer.take(msg.OpenSave)
    peer.receive(opened)
    handle = saved.result(20)
    assert "epoch 1 before it was not saved: StaleEpoch" in handle.times.notes
    (line,) = lines(caplog)
    assert caplog.records[-1].levelno == logging.ERROR
    for part in ("epoch 1 was not saved", "rank 0", client.store, "StaleEpoch", "save a newer one"):
        assert part in line
    peer.reach(opened, "staged", "durable")
    assert handle.wait(timeout_s=20).durable
    saved = background.submit(client.save, ITEMS, epoch=11)
    opened = peer.take(msg.OpenSave)
    peer.receive(opened)
    peer.reach(opened, "staged", "durable")
    last = saved.result(20)
    assert last.wait(timeout_s=20).durable
    assert not [note for note in last.times.notes if "not saved" in note]
    client.close()
    assert len(lines(caplog)) == 2
    assert "1 of 3 saves of this process failed" in lines(caplog)[1]
    assert "the last durable epoch is 11" in lines(caplog)[1]


@pytest.mark.parametrize("how", ["error", "wait", "callback"])
def test_a_failure_that_is_read_is_not_logged_as_an_error(
    agent: FakeAgent,
    connect: Connect,
    background: Background,
    caplog: pytest.LogCaptureFixture,
    how: str,
) -> None:
    client = connect()
    peer = agent.peer()
    handle = failing_save(client, peer, background, 1)
    if how == "error":
        assert isinstance(handle.error, groupio.StaleEpoch)
    elif how == "wait":
        with pytest.raises(groupio.StaleEpoch):
            handle.wait()
    else:
        handle.add_done_callback("durable", lambda h: h.error)
    client.close()
    assert not [r for r in caplog.records if r.levelno >= logging.ERROR]
    assert "1 of 1 saves of this process failed" in lines(caplog)[0]
    assert "none is durable" in lines(caplog)[0]


def test_the_wait_inside_a_save_does_not_count_as_reading(
    agent: FakeAgent, connect: Connect, background: Background, caplog: pytest.LogCaptureFixture
) -> None:
    client = connect()
    peer = agent.peer()
    saved = background.submit(client.save, ITEMS, epoch=1, wait_for="durable")
    opened = peer.take(msg.OpenSave)
    peer.receive(opened)
    peer.fail(opened, groupio.StorageFull("full; make room", path="/s", needed=2, free=1))
    saved.result(20)
    client.close()
    assert "StorageFull: full; make room" in lines(caplog)[0]


def test_a_failure_is_logged_though_no_other_call_follows(
    agent: FakeAgent,
    connect: Connect,
    background: Background,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(failures, "GRACE_S", 0.02)
    client = connect()
    failing_save(client, agent.peer(), background, 1)
    reporter = client._failures._reporter
    if reporter is not None:
        reporter.join(20)
    assert len(lines(caplog)) == 1
    client.close()
    assert len(lines(caplog)) == 2


def test_a_commit_that_is_found_after_all_is_no_failure(
    connect: Connect, agent: FakeAgent, caplog: pytest.LogCaptureFixture
) -> None:
    client = connect()
    handle = groupio.SaveHandle(4, 0.0, failures=client._failures)
    client._failures.began(4)
    handle._fail(groupio.AgentLost("gone; save again"))
    handle._reach(groupio.model.Level.DURABLE, 1.0)
    client.close()
    assert not lines(caplog)


CONFIGURATIONS = {
    "nothing": "",
    "own logger only": "own = logging.getLogger('train'); own.addHandler(logging.StreamHandler())",
    "root at CRITICAL": "logging.basicConfig(level=logging.CRITICAL)",
    "a handler at CRITICAL": "logging.basicConfig(); "
    "logging.getLogger().handlers[0].setLevel(logging.CRITICAL)",
    "everything disabled": "logging.disable(logging.CRITICAL)",
    "existing loggers disabled": "import logging.config; logging.config.dictConfig({'version': 1})",
    "a handler that drops": "logging.getLogger().addHandler(logging.NullHandler())",
    "no last resort": "logging.lastResort = None",
    "basic": "logging.basicConfig()",
}


def run_loop(agent: FakeAgent, tmp_path: Path, configuration: str) -> tuple[int, str]:
    """Exit code and stderr of a loop of three failing saves that never looks at its handles."""
    script = textwrap.dedent(
        f"""
        import logging
        from pathlib import Path
        import groupio
        from groupio.agent import spawn
        from groupio.client.client import unconnected
        {configuration}
        def refuse(settings, timeout_s=0):
            raise groupio.AgentLost("no agent here; start one")
        spawn.ensure_agent = refuse
        settings = groupio.Settings(runtime_dir={str(tmp_path)!r}, close_timeout_s=1)
        logging.getLogger("groupio").info("not shown")
        client = unconnected({str(tmp_path / "s")!r}, settings=settings)
        for epoch in range(1, 4):
            client.save({{"a": 1}}, epoch=epoch)
        """
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60
    )
    return done.returncode, done.stderr


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_a_loop_that_looks_at_nothing_is_told_on_stderr(
    agent: FakeAgent, tmp_path: Path, name: str
) -> None:
    code, said = run_loop(agent, tmp_path, CONFIGURATIONS[name])
    assert code == 0
    for epoch in (1, 2, 3):
        assert said.count(f"epoch {epoch} was not saved") == 1, said
    assert said.count("no agent here; start one") == 3
    assert said.count("3 of 3 saves of this process failed") == 1
    assert "none is durable" in said


def test_only_a_level_of_its_own_loggers_silences_it(agent: FakeAgent, tmp_path: Path) -> None:
    code, said = run_loop(
        agent, tmp_path, "logging.getLogger('groupio').setLevel(logging.CRITICAL)"
    )
    assert (code, said) == (0, "")
