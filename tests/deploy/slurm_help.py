"""Slurm on this one machine, out of a folder: munged, slurmctld and slurmd as processes."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "sinfo", "scontrol")
START_S = 60.0

_CONF = """
ClusterName=groupio
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ctl_port}
SlurmdPort={node_port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CryptoType=crypto/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SchedulerType=sched/backfill
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
ReturnToService=2
SlurmdTimeout=300
NodeName={host} NodeAddr=127.0.0.1 CPUs={cpus}
PartitionName=all Nodes={host} Default=YES MaxTime=INFINITE State=UP OverSubscribe=FORCE:4
"""


def missing_programs() -> list[str]:
    """What is not installed of Debian's slurm-wlm and munge."""
    return [name for name in PROGRAMS if find(name) is None]


def find(name: str) -> str | None:
    """Where a program is; daemons are not in everybody's PATH."""
    return shutil.which(name, path=os.environ.get("PATH", "") + ":/usr/sbin:/sbin")


class Slurm:
    """A cluster of this machine alone. Needs root, as slurmd does."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._running: list[subprocess.Popen[bytes]] = []
        host = socket.gethostname().partition(".")[0]
        ports = [_free_port() for _ in range(2)]
        folder.chmod(0o755)  # munged refuses a folder that others could change, and no more
        for name in ("state", "spool"):
            (folder / name).mkdir()
        text = _CONF.format(
            host=host, folder=folder, ctl_port=ports[0], node_port=ports[1], cpus=os.cpu_count()
        )
        (folder / "slurm.conf").write_text(text)

    @property
    def environment(self) -> dict[str, str]:
        """What commands need to talk to this cluster."""
        return {"SLURM_CONF": str(self.folder / "slurm.conf")}

    def start(self) -> None:
        """Start the daemons; returns once the node takes jobs."""
        folder = self.folder
        key = folder / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        munged = [find("munged"), "--foreground", "--force", f"--key-file={key}"]
        munged += [f"--socket={folder}/munge.socket", f"--pid-file={folder}/munged.pid"]
        munged += [f"--log-file={folder}/munged.log", f"--seed-file={folder}/munged.seed"]
        self._spawn("munged", munged)
        self._wait(lambda: (folder / "munge.socket").exists())
        self._spawn("slurmctld", [find("slurmctld"), "-D"])
        self._spawn("slurmd", [find("slurmd"), "-D"])
        self._wait(lambda: "idle" in self.command("sinfo", "--noheader", "--format=%T").stdout)

    def command(self, name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run a Slurm command to its end."""
        return subprocess.run(
            [name, *arguments],
            env={**os.environ, **self.environment},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    def stop(self) -> None:
        """End the daemons, the last one first."""
        for process in reversed(self._running):
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._running.clear()

    def _spawn(self, name: str, command: list[str | None]) -> None:
        with (self.folder / f"{name}.out").open("wb") as out:
            self._running.append(
                subprocess.Popen(
                    [part for part in command if part is not None],
                    env={**os.environ, **self.environment},
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=out,
                )
            )

    def _wait(self, condition: object) -> None:
        assert callable(condition)
        deadline = time.monotonic() + START_S
        while not condition():
            dead = [p.args for p in self._running if p.poll() is not None]
            assert not dead, (dead, self.logs())
            assert time.monotonic() < deadline, self.logs()
            time.sleep(0.1)

    def logs(self) -> str:
        """What the daemons said."""
        names = sorted([*self.folder.glob("*.out"), *self.folder.glob("*.log")])
        return "\n".join(f"{n.name}: {n.read_text(errors='replace')[-2000:]}" for n in names)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
