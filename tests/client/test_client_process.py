"""The client and the life of its process: environment, settings, forks, exit, imports."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from client_store import StoreBuilder
from fake_agent import Background, FakeAgent

import groupio
from groupio.client import launch
from groupio.protocol import messages as msg

Connect = Callable[..., groupio.Client]


def in_child(check: Callable[[], None]) -> None:
    """Run ``check`` in a forked child; fail when it does."""
    pid = os.fork()
    if pid == 0:
        try:
            check()
            os._exit(0)
        except BaseException:  # noqa: BLE001  the child must not go on as a second test run
            traceback.print_exc()
        finally:
            os._exit(1)
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            assert status == 0
            return
        time.sleep(0.01)
    os.kill(pid, 9)
    os.waitpid(pid, 0)
    raise AssertionError("the child hangs")


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_forked_child_cannot_use_the_client_and_does_not_disturb_it(
    store: StoreBuilder, agent: FakeAgent, connect: Connect, background: Background
) -> None:
    store.commit(1, [{"a": 1}])
    client = connect()
    peer = agent.peer()
    saved = background.submit(client.save, {"w": np.arange(1 << 20)}, epoch=2)
    opened = peer.take(msg.OpenSave)
    peer.receive(opened)
    handle = saved.result(20)
    fd = client._connections[0]._channel.fileno()
    arena_fd = client._connections[0]._arena._fd

    def check() -> None:
        for call in (lambda: client.save({"a": 1}, epoch=3), client.load, client.epochs):
            with pytest.raises(groupio.InvalidInput, match=r"groupio\.connect in this process"):
                call()
        with pytest.raises(groupio.InvalidInput, match="forked"):
            handle.wait()
        assert handle.times.released is not None
        assert handle.error is None
        assert "another process" in repr(client)
        for closed in (fd, arena_fd):
            with pytest.raises(OSError, match="Bad file descriptor"):
                os.fstat(closed)
        client.close()
        with groupio.connect(client.store, settings=client.settings) as own:
            assert own.load(1) == {"a": 1}

    in_child(check)
    assert agent.peer().take(msg.Bye)
    peer.reach(opened, "staged", "durable")
    assert handle.wait(timeout_s=20).durable
    assert client.load(1) == {"a": 1}


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_fork_in_the_middle_of_a_save_leaves_no_lock_held(
    agent: FakeAgent, connect: Connect, background: Background
) -> None:
    client = connect()
    peer = agent.peer()
    saved = background.submit(client.save, {"w": np.arange(1 << 20)}, epoch=2)
    opened = peer.take(msg.OpenSave)
    with client._connecting, client._connections[0]._lock:
        in_child(lambda: client._connections[0].saves() and client.close())
    peer.receive(opened)
    assert saved.result(20).error is None


def test_exit_waits_for_own_saves_and_says_goodbye(agent: FakeAgent, tmp_path: Path) -> None:
    script = textwrap.dedent(
        f"""
        from pathlib import Path
        import groupio
        from groupio.agent import spawn
        spawn.ensure_agent = lambda settings, timeout_s: Path({str(agent.path)!r})
        settings = groupio.Settings(runtime_dir={str(tmp_path)!r}, close_timeout_s=20)
        client = groupio.connect({str(tmp_path / "store")!r}, settings=settings)
        client.save({{"a": b"x" * 100}}, epoch=1)
        del client
        print("end of script", flush=True)
        """
    )
    child = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    try:
        peer = agent.peer()
        opened = peer.take(msg.OpenSave)
        assert peer.receive(opened)["a"] == b"x" * 100
        assert child.stdout is not None
        assert child.stdout.readline() == "end of script\n"
        time.sleep(0.05)
        assert child.poll() is None
        peer.reach(opened, "staged", "durable")
        peer.take(msg.Bye)
        assert child.wait(20) == 0
    finally:
        child.kill()
        child.wait(20)
        assert child.stdout is not None
        child.stdout.close()


def test_import_and_connect_load_little(agent: FakeAgent, tmp_path: Path) -> None:
    script = textwrap.dedent(
        f"""
        import sys
        from pathlib import Path
        import groupio
        assert "numpy" not in sys.modules
        from groupio.agent import spawn
        spawn.ensure_agent = lambda settings, timeout_s: Path({str(agent.path)!r})
        settings = groupio.Settings(runtime_dir={str(tmp_path)!r})
        with groupio.connect({str(tmp_path / "store")!r}, settings=settings):
            loaded = {{"numpy", "blake3", "torch", "ml_dtypes"}} & set(sys.modules)
            assert not loaded, loaded
        assert set(groupio.__all__) <= set(dir(groupio))
        assert [getattr(groupio, name) for name in groupio.__all__]
        """
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


def test_unknown_names_of_the_package_are_attribute_errors() -> None:
    with pytest.raises(AttributeError, match="no attribute 'lod'"):
        _ = groupio.lod


@pytest.mark.parametrize(
    ("rank", "world", "environ", "place"),
    [
        (None, None, {}, (0, 1)),
        (3, 4, {}, (3, 4)),
        (None, None, {"RANK": "3", "WORLD_SIZE": "4", "SLURM_PROCID": "9"}, (3, 4)),
        (1, None, {"RANK": "3", "WORLD_SIZE": "4"}, (1, 4)),
        (None, 8, {"RANK": "3", "WORLD_SIZE": "4"}, (3, 8)),
        (None, None, {"SLURM_PROCID": "1", "SLURM_NTASKS": "2"}, (1, 2)),
        (None, None, {"OMPI_COMM_WORLD_RANK": "5", "OMPI_COMM_WORLD_SIZE": "6"}, (5, 6)),
        (0, 1, {"RANK": "x"}, (0, 1)),
    ],
)
def test_the_place_in_the_job(
    rank: int | None, world: int | None, environ: dict[str, str], place: tuple[int, int]
) -> None:
    assert launch.find_place(rank, world, environ) == place


@pytest.mark.parametrize(
    ("rank", "world", "environ", "says"),
    [
        (None, None, {"RANK": "0"}, "RANK is set and WORLD_SIZE is not"),
        (None, None, {"SLURM_NTASKS": "2"}, "SLURM_NTASKS is set and SLURM_PROCID is not"),
        (None, None, {"RANK": "a", "WORLD_SIZE": "2"}, "RANK='a'"),
        (1, None, {}, "rank is given without world_size"),
        (None, 2, {}, "world_size is given without rank"),
        (2, 2, {}, "rank=2"),
        (-1, 2, {}, "rank=-1"),
        (None, None, {"RANK": "4", "WORLD_SIZE": "4"}, "RANK and WORLD_SIZE"),
        (0, 0, {}, "world_size=0"),
        (0, 1 << 30, {}, "world_size"),
        (True, 2, {}, "bool"),
        (0.0, 2, {}, "float"),
    ],
)
def test_a_place_that_cannot_be(rank: Any, world: Any, environ: dict[str, str], says: str) -> None:
    with pytest.raises(groupio.InvalidInput, match=says):
        launch.find_place(rank, world, environ)


TORCHRUN = {
    "RANK": "0",
    "WORLD_SIZE": "2",
    "TORCHELASTIC_RUN_ID": "none",
    "MASTER_PORT": "29500",
}
SLURM = {"SLURM_PROCID": "0", "SLURM_NTASKS": "2", "SLURM_JOB_ID": "71", "SLURM_STEP_ID": "0"}
OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2", "PMIX_NAMESPACE": "prte@1"}


@pytest.mark.parametrize(
    ("launcher", "of_a_rank"),
    [
        (TORCHRUN, {"TORCHELASTIC_RESTART_COUNT": "1", "RANK": "1", "GROUP_RANK": "1"}),
        (SLURM, {"SLURM_PROCID": "1", "SLURM_NODEID": "1", "SLURM_LOCALID": "0"}),
        (OPEN_MPI, {"OMPI_COMM_WORLD_RANK": "1", "PMIX_RANK": "1"}),
        (TORCHRUN, {"SLURM_JOB_ID": "71", "SLURM_STEP_ID": "4", "PMIX_NAMESPACE": "other"}),
    ],
)
def test_all_ranks_of_a_launch_see_one_id(
    launcher: dict[str, str], of_a_rank: dict[str, str]
) -> None:
    assert launch.launch_id(launcher) == launch.launch_id(launcher | of_a_rank) is not None


@pytest.mark.parametrize(
    ("launcher", "of_the_next"),
    [
        (TORCHRUN, {"MASTER_PORT": "29501"}),
        (TORCHRUN, {"TORCHELASTIC_RUN_ID": "again"}),
        (SLURM, {"SLURM_STEP_ID": "1"}),
        (SLURM, {"SLURM_JOB_ID": "72"}),
        (SLURM, {"SLURM_RESTART_COUNT": "1"}),
        (OPEN_MPI, {"PMIX_NAMESPACE": "prte@2"}),
    ],
)
def test_a_launch_is_told_from_the_next(
    launcher: dict[str, str], of_the_next: dict[str, str]
) -> None:
    assert launch.launch_id(launcher) != launch.launch_id(launcher | of_the_next)


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"MASTER_PORT": "29500", "RANK": "0", "WORLD_SIZE": "2"},
        {"TORCHELASTIC_RUN_ID": "none", "MASTER_PORT": "29500"},
        SLURM | {"SLURM_HET_SIZE": "2"},
        {"SLURM_JOB_ID": "71", "SLURM_PROCID": "0", "SLURM_NTASKS": "2"},
    ],
)
def test_where_no_id_is_seen_alike_there_is_none(environ: dict[str, str]) -> None:
    assert launch.launch_id(environ) is None


def test_ranks_numbered_by_hand_have_no_id_of_a_launcher(
    agent: FakeAgent, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch script's variables would otherwise count for the one rank whose numbers match."""
    for name, value in SLURM.items():
        monkeypatch.setenv(name, value)
    with groupio.connect(tmp_path / "store", rank=0, world_size=2) as client:
        assert client._launch_id is None
    with groupio.connect(tmp_path / "store") as client:
        assert client._launch_id == "slurm:71.0:0"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"controller": "somewhere"}, "tcp://host:port"),
        ({"job": ""}, "job"),
        ({"rewind_to": -1}, "rewind_to"),
        ({"settings": {"replicas": 1}}, "Settings"),
    ],
)
def test_connect_refuses_wrong_arguments(
    agent: FakeAgent, tmp_path: Path, arguments: dict[str, Any], says: str
) -> None:
    with pytest.raises(groupio.InvalidInput, match=says):
        groupio.connect(tmp_path / "store", **arguments)
    assert agent.starts == 0


def test_settings_allow_as_many_copies_as_groups_do() -> None:
    assert groupio.Settings(replicas=16).replicas == 16
    with pytest.raises(groupio.InvalidInput, match="from 1 to 16"):
        groupio.Settings(replicas=17)


@pytest.mark.parametrize("store", ["", "a\0b", "s3://bucket/x", b"bytes", 5])
def test_connect_refuses_what_is_no_store(agent: FakeAgent, store: Any) -> None:
    with pytest.raises(groupio.InvalidInput, match="store"):
        groupio.connect(store)


def test_the_name_of_a_store_and_its_job(
    connect: Connect, agent: FakeAgent, tmp_path: Path
) -> None:
    assert connect(controller="local").job == "store"
    url = groupio.connect(f"file://{tmp_path}/a%20b", settings=groupio.Settings())
    assert (url.store, url.job) == (f"{tmp_path}/a b", "a b")
    url.close()
    assert "rank 0 of 1" in repr(url)


def test_settings_come_from_the_environment() -> None:
    settings = groupio.Settings.from_env(
        {
            "GROUPIO_MEMORY_BYTES": "1.5 GiB",
            "GROUPIO_FILE_MODE": "660",
            "GROUPIO_IDLE_S": "2.5",
            "GROUPIO_LOG_LEVEL": "DEBUG",
            "GROUPIO_UPLINK_BYTES_PER_S": "2g",
            "GROUPIO_READ_THREADS": "3",
            "GROUPIO_REPLICAS": " ",
            "GROUPIO_OTHER": "ignored",
        }
    )
    assert settings == groupio.Settings(
        memory_bytes=3 << 29,
        file_mode=0o660,
        idle_s=2.5,
        log_level="debug",
        uplink_bytes_per_s=2 << 30,
        read_threads=3,
    )


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("MEMORY_BYTES", "lots"),
        ("MEMORY_BYTES", "1M"),
        ("REPLICAS", "0"),
        ("REPLICAS", "1.5"),
        ("FILE_MODE", "999"),
        ("FILE_MODE", "077"),
        ("IDLE_S", "-1"),
        ("IDLE_S", "nan"),
        ("CLOSE_TIMEOUT_S", "inf"),
        ("LOG_LEVEL", "loud"),
        ("UPLINK_BYTES_PER_S", "0"),
        ("READ_THREADS", "0"),
    ],
)
def test_settings_refuse_what_makes_no_sense(name: str, value: str) -> None:
    with pytest.raises(groupio.InvalidInput, match=f"(?i){name}"):
        groupio.Settings.from_env({f"GROUPIO_{name}": value})


def test_a_relative_runtime_directory_is_refused() -> None:
    with pytest.raises(groupio.InvalidInput, match="runtime_dir"):
        groupio.Settings(runtime_dir="run")
