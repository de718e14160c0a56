"""The runtime directory and its locks: private, race-free, freed by any death."""

from __future__ import annotations

import contextlib
import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
from agent_tools import WAIT_S

from groupio import wire
from groupio.agent import process, spawn
from groupio.agent.process import Residence
from groupio.errors import AgentLost, InvalidInput


def test_the_directory_is_chosen_by_setting_then_session_then_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert process.runtime_paths("/somewhere", "1").directory == Path("/somewhere")
    assert process.runtime_paths(None, "1").directory == tmp_path / "groupio"
    for absent in ("", "relative", str(tmp_path / "absent")):
        monkeypatch.setenv("XDG_RUNTIME_DIR", absent)
        expected = Path(f"/tmp/groupio-{os.getuid()}")
        assert process.runtime_paths(None, "1").directory == expected
    with pytest.raises(InvalidInput, match="not absolute"):
        process.runtime_paths("relative", "1")


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_an_inherited_session_directory_of_another_user_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As after su and sudo -E: its owner could pose as the agent."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "theirs"))
    (tmp_path / "theirs").mkdir(mode=0o700)
    os.chown(tmp_path / "theirs", 65534, 65534)
    paths = process.runtime_paths(None, "1")
    assert paths.directory == Path(f"/tmp/groupio-{os.getuid()}")
    assert f"XDG_RUNTIME_DIR={tmp_path / 'theirs'} is another user's" in paths.note
    assert list((tmp_path / "theirs").iterdir()) == []
    for _ in range(2):
        spawn._say_once(paths.note)
    assert caplog.text.count("is another user's") == 1
    (tmp_path / "theirs" / "groupio").mkdir(mode=0o700)
    os.chown(tmp_path / "theirs" / "groupio", 65534, 65534)
    stated = process.runtime_paths(str(tmp_path / "theirs" / "groupio"), "1")
    with pytest.raises(InvalidInput, match="belongs to user 65534, not to 0"):
        process.make_runtime_dir(stated)
    assert process.runtime_paths(str(tmp_path), "1").note == ""
    os.seteuid(65533)
    try:
        assert process._owner_of(str(tmp_path / "theirs" / "groupio")) == -1
    finally:
        os.seteuid(0)


def test_versions_live_side_by_side(tmp_path: Path) -> None:
    one, two = (process.runtime_paths(str(tmp_path), v) for v in ("1.0", "2.0"))
    assert one.socket.name == "agent-1.0.sock"
    assert {one.socket, one.lock, one.alive, one.log}.isdisjoint(
        {two.socket, two.lock, two.alive, two.log}
    )


def test_the_directory_is_made_private(tmp_path: Path) -> None:
    paths = process.runtime_paths(str(tmp_path / "a" / "b"), "1")
    process.make_runtime_dir(paths)
    process.make_runtime_dir(paths)
    assert stat.S_IMODE(paths.directory.stat().st_mode) == 0o700


def test_a_directory_that_others_control_is_refused(tmp_path: Path) -> None:
    own, link, file, shared = (tmp_path / name for name in ("own", "link", "file", "shared"))
    own.mkdir(mode=0o700)
    link.symlink_to(own)
    file.write_text("")
    shared.mkdir()
    shared.chmod(0o770)
    for path, why in ((link, "symbolic link"), (file, "not a directory"), (shared, "0770")):
        with pytest.raises(InvalidInput, match=why):
            process.make_runtime_dir(process.runtime_paths(str(path), "1"))
    with pytest.raises(InvalidInput, match="cannot be made"):
        process.make_runtime_dir(process.runtime_paths(str(file / "x"), "1"))


def test_a_directory_of_somebody_else_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = process.runtime_paths(str(tmp_path / "run"), "1")
    process.make_runtime_dir(paths)
    other = os.getuid() + 1
    monkeypatch.setattr(os, "getuid", lambda: other)
    with pytest.raises(InvalidInput, match=f"belongs to user {other - 1}"):
        process.make_runtime_dir(paths)


def test_one_starter_at_a_time(paths: process.RuntimePaths) -> None:
    with process.starter_lock(paths, time.monotonic() + WAIT_S):
        with (
            pytest.raises(AgentLost, match="kept starting an agent") as caught,
            process.starter_lock(paths, time.monotonic() + 0.02),
        ):
            pass
        assert caught.value.log == str(paths.log)
    with process.starter_lock(paths, time.monotonic()):
        pass


def test_a_child_forked_under_the_lock_does_not_keep_it(paths: process.RuntimePaths) -> None:
    with process.starter_lock(paths, time.monotonic() + WAIT_S):
        child = os.fork()
        if child == 0:
            signal.pause()
            os._exit(0)
    try:
        with process.starter_lock(paths, time.monotonic()):
            pass
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_a_residence_is_held_once_and_ends_with_its_process(paths: process.RuntimePaths) -> None:
    code = (
        "import sys, signal\n"
        "from groupio.agent import process\n"
        "paths = process.runtime_paths(sys.argv[1], sys.argv[2])\n"
        "residence = process.Residence.take(paths)\n"
        "print('taken', flush=True)\n"
        "signal.pause()\n"
    )
    version = paths.socket.name.removeprefix("agent-").removesuffix(".sock")
    holder = subprocess.Popen(
        [sys.executable, "-c", code, str(paths.directory), version], stdout=subprocess.PIPE
    )
    assert holder.stdout is not None
    with holder, contextlib.ExitStack() as stack:
        stack.callback(holder.kill)
        assert holder.stdout.readline() == b"taken\n"
        assert process.is_alive(paths)
        assert process.holder_pid(paths) == holder.pid
        wire.connect(paths.socket, timeout_s=5).close()
        with pytest.raises(AgentLost, match=f"process {holder.pid}.* already serves"):
            Residence.take(paths)
    assert not process.is_alive(paths)
    assert paths.socket.exists(), "a killed agent leaves its name"
    residence = Residence.take(paths)
    wire.connect(paths.socket, timeout_s=5).close()
    residence.close()


def test_a_retired_agent_is_not_found_but_serves_who_came_before(
    paths: process.RuntimePaths,
) -> None:
    residence = Residence.take(paths)
    early = wire.connect(paths.socket, timeout_s=5)
    with process.starter_lock(paths, time.monotonic() + WAIT_S):
        assert not residence.retire(), "a starter may be about to use it"
        assert paths.socket.exists()
    assert residence.retire()
    with pytest.raises(FileNotFoundError):
        wire.connect(paths.socket, timeout_s=5)
    accepted, _ = residence.listener.accept()
    for sock in (early, accepted):
        sock.close()
    assert process.is_alive(paths)
    residence.close()
    assert not process.is_alive(paths)


def test_the_starter_hears_how_it_went() -> None:
    deadline = time.monotonic() + WAIT_S
    for say, expected in (
        (process.ReadySignal.ready, {"ready": True, "pid": os.getpid()}),
        (lambda s: s.failed("no luck"), {"ready": False, "reason": "no luck"}),
        (lambda s: os.close(s._fd), None),
        (
            lambda s: (os.write(s._fd, b"{oh"), os.close(s._fd)),
            {"reason": "it said b'{oh', which is no answer of an agent"},
        ),
    ):
        reader, writer = os.pipe()
        say(process.ReadySignal(writer))
        assert process.read_ready(reader, deadline) == expected
        os.close(reader)
    reader, writer = os.pipe()
    with pytest.raises(TimeoutError):
        process.read_ready(reader, time.monotonic() + 0.01)
    os.close(reader)
    process.ReadySignal(writer).ready()  # to nobody: no error


def test_a_detached_process_has_no_tie_to_its_starter(tmp_path: Path) -> None:
    code = (
        "import os, sys, json\n"
        "from groupio.agent import process\n"
        "before = os.getsid(0)\n"
        "process.detach()\n"
        "mask = os.umask(0)\n"
        "facts = [os.getsid(0) not in (before, 0), os.getcwd(), mask]\n"
        "with open(sys.argv[1] + '.new', 'w') as f: json.dump(facts, f)\n"
        "os.rename(sys.argv[1] + '.new', sys.argv[1])\n"
    )
    facts = tmp_path / "facts"
    subprocess.run([sys.executable, "-c", code, str(facts)], check=True, timeout=WAIT_S)
    deadline = time.monotonic() + WAIT_S
    while not facts.exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert facts.read_text() == f'[true, "/", {0o077}]'


def test_the_limit_of_open_files_is_raised() -> None:
    code = (
        "import resource\n"
        "from groupio.agent.process import raise_fd_limit\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (256, 512))\n"
        "assert raise_fd_limit() == 512\n"
        "assert resource.getrlimit(resource.RLIMIT_NOFILE) == (512, 512)\n"
        "assert raise_fd_limit() == 512\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=WAIT_S)


def test_the_agent_is_not_bound_to_its_starters_processors() -> None:
    script = (
        "import os\n"
        "from groupio.agent.process import take_all_processors\n"
        "whole = os.sched_getaffinity(0)\n"
        "os.sched_setaffinity(0, {min(whole)})\n"
        "assert take_all_processors() == (1, len(whole))\n"
        "assert os.sched_getaffinity(0) == whole\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=WAIT_S)
