"""Starts the ranks of one run as processes, follows what they tell, and ends them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

import groupio
from groupio.agent import process
from groupio.bench import news
from groupio.bench.options import Options
from groupio.errors import GroupAborted, GroupTimeout, Outcome

POLL_S = 0.1
STOP_S = 10.0
AGENT_END_S = 60.0

Told = list[list[dict[str, Any]]]
"""What each rank told, in order."""


def run_ranks(
    options: Options,
    programme: str,
    runtime: Path,
    on_begin: Callable[[str, int], None],
) -> Told:
    """Run ``programme`` on all ranks to its end; ``on_begin`` hears of each (system, epoch).

    ``runtime`` is a short path for the agents, which have ended when this returns. GroupAborted
    with the rank's error when one fails, GroupTimeout when they take longer than the options
    allow; no rank is left running.
    """
    ranks = options.load_ranks if programme == "load" else options.ranks
    folder = Path(options.folder) / f"ranks-{programme}"
    folder.mkdir()
    options_file = folder / "options.json"
    options_file.write_bytes(msgspec.json.encode(options))
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(ranks):
            command = [
                *(sys.executable, "-m", "groupio.bench.rank", programme),
                *(str(options_file), str(rank), str(folder)),
            ]
            with open(folder / f"rank-{rank}.log", "wb") as log:
                processes.append(
                    subprocess.Popen(
                        command,
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=log,
                        env={
                            **environment(),
                            "GROUPIO_BENCH_RUNTIME": str(runtime),
                            "GROUPIO_IDLE_S": "1",
                            "GLOO_SOCKET_IFNAME": "lo",
                        },
                    )
                )
        _follow(options, programme, folder, processes, on_begin)
        return [news.read(folder, rank) for rank in range(ranks)]
    finally:
        end_all(processes)
        _await_agents(runtime)


def environment() -> dict[str, str]:
    """The caller's, in which Python finds this very groupio from any directory."""
    ours = str(Path(groupio.__file__).resolve().parent.parent)
    path = [ours, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(dict.fromkeys(path)),
        "PYTHONUNBUFFERED": "1",
    }


def _follow(
    options: Options,
    programme: str,
    folder: Path,
    processes: list[subprocess.Popen[bytes]],
    on_begin: Callable[[str, int], None],
) -> None:
    end = time.monotonic() + options.timeout_s
    seen = 0
    while True:
        codes = [process.poll() for process in processes]
        begun = [one for one in news.read(folder, 0) if one["kind"] == "begins"]
        for one in begun[seen:]:
            on_begin(one["system"], one["epoch"])
        seen = len(begun)
        failed = [rank for rank, code in enumerate(codes) if code not in (None, 0)]
        where = f"epoch {begun[-1]['epoch']} of {begun[-1]['system']}" if begun else "the start"
        if failed:
            time.sleep(POLL_S)  # the others may just be telling why
            raise _failure(programme, where, folder, failed, codes)
        if all(code == 0 for code in codes):
            return
        if time.monotonic() > end:
            late = [rank for rank, code in enumerate(codes) if code is None]
            raise GroupTimeout(
                f"bench {programme}: ranks {late} were not done after {options.timeout_s:.0f} s, "
                f"at {where}; give more --timeout or fewer bytes",
                missing=late,
                outcome=Outcome.UNKNOWN,
            )
        time.sleep(POLL_S)


def _failure(
    programme: str, where: str, folder: Path, failed: list[int], codes: list[int | None]
) -> GroupAborted:
    """The error of the first rank that says why; the others often only lost their peer."""
    told = {rank: news.read(folder, rank) for rank in range(len(codes))}
    reasons = {
        rank: lines[-1]["error"]
        for rank, lines in told.items()
        if lines and lines[-1]["kind"] == "failed"
    }
    rank = min(reasons, key=lambda one: ("Connection" in reasons[one], one), default=failed[0])
    reason = reasons.get(rank) or f"exit code {codes[rank]}: {_log_tail(folder, rank)}"
    return GroupAborted(
        f"bench {programme}: rank {rank} failed at {where}: {reason}; --keep leaves its log, "
        "--peers leaves a system out",
        members=[rank],
        outcome=Outcome.UNKNOWN,
    )


def _log_tail(folder: Path, rank: int) -> str:
    lines = (folder / f"rank-{rank}.log").read_text(errors="replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "it printed nothing")


def end_all(processes: list[subprocess.Popen[bytes]]) -> None:
    """Ask the processes that still run to end, then kill them."""
    for one in processes:
        if one.poll() is None:
            one.send_signal(signal.SIGTERM)
    end = time.monotonic() + STOP_S
    for one in processes:
        try:
            one.wait(max(0.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            one.kill()
            one.wait(STOP_S)


def _await_agents(runtime: Path) -> None:
    """Wait until the agents of this run are gone: they end by themselves, being idle."""
    end = time.monotonic() + AGENT_END_S
    for folder in sorted(runtime.iterdir()) if runtime.exists() else ():
        paths = process.runtime_paths(str(folder), groupio.__version__)
        while process.is_alive(paths) and time.monotonic() < end:
            time.sleep(POLL_S)
