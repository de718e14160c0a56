"""``doctor`` reads the machine's limits right and says what to do."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from cli_help import Command
from store_maker import StoreMaker

from groupio.agent import process
from groupio.backend.base import BackendInfo
from groupio.backend.posix import PosixBackend
from groupio.cli import checks
from groupio.cli.checks import Verdict
from groupio.cli.host import Host

GIB = 1 << 30

MEMINFO = f"MemTotal: {64 << 20} kB\nMemAvailable: {32 << 20} kB\nSwapTotal: 1024 kB\n"


def lay_out(root: Path, files: dict[str, str]) -> Host:
    """A machine that is nothing but these files."""
    for name, content in {"proc/meminfo": MEMINFO, "proc/1/comm": "systemd\n", **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return Host(root)


def test_memory_without_limits(tmp_path: Path) -> None:
    memory = lay_out(tmp_path, {"proc/self/cgroup": "0::/user.slice\n"}).memory()
    assert (memory.total, memory.available, memory.limit) == (64 * GIB, 32 * GIB, None)
    assert memory.usable == 32 * GIB


def test_the_tightest_limit_of_cgroup_v2_counts(tmp_path: Path) -> None:
    host = lay_out(
        tmp_path,
        {
            "proc/self/cgroup": "0::/a.slice/b.scope\n",
            "sys/fs/cgroup/a.slice/memory.max": str(8 * GIB),
            "sys/fs/cgroup/a.slice/memory.current": str(3 * GIB),
            "sys/fs/cgroup/a.slice/b.scope/memory.max": "max",
        },
    )
    memory = host.memory()
    assert memory.limit is not None
    assert memory.limit.path == "/sys/fs/cgroup/a.slice"
    assert memory.usable == 5 * GIB
    assert memory.bound == 8 * GIB
    check = checks.check_memory(host)
    assert "cgroup limit 8.0 GiB (3.0 GiB used)" in check.finding
    assert "/sys/fs/cgroup/a.slice" in check.advice
    assert "swap is on" in check.advice


def test_a_container_sees_its_cgroup_v1_at_the_mount(tmp_path: Path) -> None:
    host = lay_out(
        tmp_path,
        {
            "proc/self/cgroup": "4:memory:/docker/0123\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": str(2 * GIB),
            "sys/fs/cgroup/memory/memory.usage_in_bytes": str(3 * GIB),
        },
    )
    assert host.memory().usable == 0
    unlimited = {"sys/fs/cgroup/memory/memory.limit_in_bytes": str((1 << 63) - 4096)}
    assert lay_out(tmp_path, unlimited).memory().limit is None


def test_a_budget_that_cannot_be_had_fails(tmp_path: Path) -> None:
    host = lay_out(tmp_path, {})
    assert checks.check_budget(33 * GIB, host).verdict is Verdict.FAIL
    assert checks.check_budget(64 << 20, host).verdict is Verdict.WARN
    assert checks.check_budget(8 * GIB, host).verdict is Verdict.OK


@pytest.mark.parametrize(
    ("kind", "files"),
    [
        ("none", {"proc/self/cgroup": "0::/\n"}),
        ("slurm", {"proc/self/cgroup": "0::/system.slice/slurmstepd.scope/job_7/step_0\n"}),
        ("slurm", {"proc/self/cgroup": "4:memory:/slurm/uid_0/job_7\n"}),
        ("container", {"proc/self/cgroup": "0::/kubepods.slice/pod1/x\n"}),
        ("container", {"proc/self/cgroup": "0::/system.slice/docker-01ab.scope\n"}),
        ("pid-namespace", {"proc/self/cgroup": "0::/\n", "proc/1/comm": "torchrun\n"}),
        ("pid-namespace", {"proc/self/status": "Name:\tx\nNSpid:\t77\t1\n"}),
        ("login", {"proc/self/cgroup": "0::/user.slice/user-1.slice/session-3.scope\n"}),
        ("service", {"proc/self/cgroup": "0::/system.slice/train.service\n"}),
    ],
)
def test_what_ends_with_the_launcher(tmp_path: Path, kind: str, files: dict[str, str]) -> None:
    host = lay_out(tmp_path, files)
    assert host.scope().kind == kind
    check = checks.check_scope(host)
    assert check.data["kind"] == kind
    harmless = kind in ("none", "login")
    assert check.verdict is (Verdict.OK if harmless else Verdict.WARN)
    assert bool(check.advice) is not harmless


def test_a_login_that_kills_what_it_left(tmp_path: Path) -> None:
    files = {"proc/self/cgroup": "0::/user.slice/session-3.scope\n"}
    setting = {"etc/systemd/logind.conf": "[Login]\n#KillUserProcesses=no\nKillUserProcesses=yes\n"}
    check = checks.check_scope(lay_out(tmp_path, files | setting))
    assert check.verdict is Verdict.WARN
    assert "enable-linger" in check.advice


def test_huge_pages_and_shared_memory(tmp_path: Path) -> None:
    folder = "sys/kernel/mm/transparent_hugepage"
    host = lay_out(
        tmp_path,
        {
            f"{folder}/enabled": "always [madvise] never",
            f"{folder}/shmem_enabled": "always within_size advise [never] deny force",
        },
    )
    assert host.thp() == ("madvise", "never")
    assert "shmem_enabled" in checks.check_huge_pages(host).advice
    assert checks.check_shared_memory(host).data == {"size": None}
    (tmp_path / "dev/shm").mkdir(parents=True)
    assert checks.check_shared_memory(host).data["size"] > 0
    assert Host(tmp_path / "absent").thp() == ("unknown", "unknown")


def test_doctor_of_this_machine(groupio: Command, maker: StoreMaker) -> None:
    done = groupio("doctor", maker.path, "--json")
    found = {check["name"]: check for check in done.json["checks"]}
    assert done.code == (0 if done.json["ok"] else 1)
    assert found["store"]["data"]["job"] == "job"
    assert found["file system"]["data"]["node_local"] in (True, False)
    assert found["commit"]["data"]["commit_mode"] in ("link", "rename_noreplace")
    assert found["open files"]["data"]["hard"] >= found["open files"]["data"]["soft"]
    assert found["budget"]["data"]["budget"] > 0
    assert "agent's life" in groupio("doctor").out


def test_doctor_tries_the_disk_of_a_store_that_is_not_there_yet(
    groupio: Command, tmp_path: Path
) -> None:
    done = groupio("doctor", tmp_path / "deep" / "store", "--json")
    found = {check["name"]: check for check in done.json["checks"]}
    assert "not there yet" in found["store"]["finding"]
    assert "commit" in found
    assert not (tmp_path / "deep").exists()
    assert not [p for p in tmp_path.iterdir() if "doctor" in p.name]


def test_doctor_fails_for_a_store_that_is_a_file(groupio: Command, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = groupio("doctor", tmp_path / "file", "--json")
    assert done.code == 1
    assert [c["name"] for c in done.json["checks"] if c["verdict"] == "fail"] == ["store"]


def test_doctor_warns_of_disks_that_do_not_last(
    groupio: Command, maker: StoreMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    def info(self: PosixBackend) -> BackendInfo:
        return BackendInfo("posix", self.path, True, "tmpfs", "buffered", "none", None, False)

    monkeypatch.setattr(PosixBackend, "info", info)
    done = groupio("doctor", maker.path, "--json")
    found = {check["name"]: check for check in done.json["checks"]}
    assert found["file system"]["verdict"] == "warn"
    assert "power loss" in found["file system"]["advice"]
    assert found["writing"]["verdict"] == "warn"
    assert "free space" not in found


def test_doctor_distrusts_an_open_runtime_directory(groupio: Command, tmp_path: Path) -> None:
    (tmp_path / "runtime").mkdir()
    os.chmod(tmp_path / "runtime", 0o777)
    done = groupio("doctor", "--json")
    assert done.code == 1
    assert [c["name"] for c in done.json["checks"] if c["verdict"] == "fail"] == ["agent's place"]


def test_an_old_torch_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda name: "2.5.1+cpu")
    assert checks.check_torch().verdict is Verdict.FAIL
    monkeypatch.setattr("importlib.metadata.version", lambda name: "2.13.0")
    assert checks.check_torch().verdict is Verdict.OK


@pytest.fixture
def reachable(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory whose parents let everybody pass."""
    path = Path(tempfile.mkdtemp(prefix="groupio-doctor-test-"))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path)


@pytest.mark.parametrize(
    ("umask", "group", "others"),
    [(0o022, True, True), (0o027, True, False), (0o077, False, False)],
)
def test_who_can_read_a_store(reachable: Path, umask: int, group: bool, others: bool) -> None:
    with PosixBackend.open(reachable / "s", create=True, umask=umask) as store:
        store.ensure_store_record("job")
    check = checks.check_access(str(reachable / "s"))
    assert check.verdict is Verdict.OK
    assert (check.data["group_reads"], check.data["others_read"]) == (group, others)
    assert check.data["owner"] in check.finding
    assert ("group root reads" in check.finding) is group
    # One file that is not for the others is enough to keep them out.
    segment = reachable / "s" / "segments" / "x.seg"
    segment.touch()
    segment.chmod(0o600)
    check = checks.check_access(str(reachable / "s"))
    assert not check.data["group_reads"]
    assert not check.data["others_read"]
    if group:
        assert f"{segment} is not for the group" in check.advice


def test_a_parent_that_lets_others_not_pass(reachable: Path) -> None:
    with PosixBackend.open(reachable / "home" / "s", create=True, umask=0o022) as store:
        store.ensure_store_record("job")
    (reachable / "home").chmod(0o700)
    check = checks.check_access(str(reachable / "home" / "s"))
    assert check.verdict is Verdict.WARN
    assert check.data["blocked_by"] == [str(reachable / "home")]
    assert f"{reachable / 'home'} lets them not pass" in check.advice
    assert not check.data["others_read"]
    # The group of the store passes a directory of the same group.
    (reachable / "home").chmod(0o710)
    check = checks.check_access(str(reachable / "home" / "s"))
    assert check.data["group_reads"]
    assert not check.data["others_read"]


def test_an_inherited_runtime_directory_of_another_user_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "_owner_of", lambda directory: 4711)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    check = checks.check_runtime_dir(process.runtime_paths(None, "test"))
    assert check.verdict is Verdict.WARN
    assert str(tmp_path) in check.advice
