"""Measures one node against its physical limits, in one run: ``python benchmarks/one_node.py``.

Every figure stands beside the limit that was measured right before or after it by the same
processes: a memcpy into warm memory for the stall, a raw sequential write and fsync for DURABLE.
Times are the maximum over ranks from a common barrier; figures are medians of the epochs after the
first. The raw write has several modes; the limit is the mode whose median is the fastest. The disk
is left to settle before each measurement. The page cache is not dropped: nothing is read.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import mmap
import multiprocessing as mp
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

MIB = 1 << 20


def rank_main(rank: int, args: argparse.Namespace, shape: str, store: str, barrier, out) -> None:
    """One rank: copies, saves and reports its times for every epoch."""
    import groupio

    size = args.mb_per_rank * MIB
    seed = 0 if shape == "equal" else rank
    source = np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)
    warm = np.ones_like(source)
    client = groupio.connect(store, rank=rank, world_size=args.ranks)
    for epoch in range(1, args.epochs + 1):
        barrier.wait()
        started = time.perf_counter()
        ctypes.memmove(warm.ctypes.data, source.ctypes.data, size)
        copied = time.perf_counter() - started
        barrier.wait()
        started = time.perf_counter()
        handle = client.save({"weights": source}, epoch=epoch)
        stalled = time.perf_counter() - started
        times = handle.wait("durable", timeout_s=300)
        out.put((epoch, rank, copied, stalled, times.staged, times.durable))
        barrier.wait()
        if shape == "unique":
            # Every page changes, or the next epoch would refer to this one.
            source[::512] += np.uint8(1)
        barrier.wait()
    client.close()


def raw_write(path: Path, data: memoryview, block: int, *, direct: bool) -> float:
    """Seconds to write ``data`` sequentially and fsync it; an existing file is replaced."""
    path.unlink(missing_ok=True)
    flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | (os.O_DIRECT if direct else 0)
    fd = os.open(path, flags, 0o600)
    try:
        started = time.perf_counter()
        for at in range(0, len(data), block):
            os.pwrite(fd, data[at : at + block], at)
        os.fsync(fd)
        return time.perf_counter() - started
    finally:
        os.close(fd)
        path.unlink()


def settle(seconds: float = 1.0) -> None:
    """Let the disk finish what came before: writes, and the removal of large files."""
    os.sync()
    time.sleep(seconds)


def raw_limits(folder: Path, size: int) -> dict[str, float]:
    """Seconds of a raw write of ``size`` unique bytes, in each mode."""
    buffer = mmap.mmap(-1, size)
    view = memoryview(buffer)
    np.frombuffer(view, np.uint64)[:] = np.random.default_rng(7).integers(0, 1 << 62, size // 8)
    path = folder / "raw.bin"
    modes = {
        "direct_4MiB": (4 * MIB, True),
        "direct_16MiB": (16 * MIB, True),
        "buffered_16MiB": (16 * MIB, False),
    }
    seconds = {}
    for name, (block, direct) in modes.items():
        settle()
        seconds[name] = raw_write(path, view, block, direct=direct)
    settle()
    return seconds


def run_shape(args: argparse.Namespace, shape: str, folder: Path) -> list[dict[str, Any]]:
    """All epochs of one shape; one record per epoch."""
    import groupio

    store = str(folder / f"store-{shape}")
    context = mp.get_context("spawn")
    barrier, out = context.Barrier(args.ranks + 1), context.Queue()
    ranks = [
        context.Process(target=rank_main, args=(r, args, shape, store, barrier, out))
        for r in range(args.ranks)
    ]
    for process in ranks:
        process.start()
    unique = args.mb_per_rank * MIB * (args.ranks if shape == "unique" else 1)
    records = []
    for epoch in range(1, args.epochs + 1):
        for _ in range(3):
            barrier.wait(timeout=600)
        rows = [out.get(timeout=60) for _ in range(args.ranks)]
        # Between the barriers only this process works.
        limits = raw_limits(folder, unique) if shape == "unique" else {}
        barrier.wait(timeout=600)
        records.append(
            {
                "shape": shape,
                "epoch": epoch,
                "limit_stall_s": max(row[2] for row in rows),
                "stall_s": max(row[3] for row in rows),
                "staged_s": max(row[4] for row in rows),
                "durable_s": max(row[5] for row in rows),
                "raw_s": limits,
            }
        )
    with groupio.connect(store, rank=0, world_size=args.ranks) as client:
        for record, info in zip(records, client.epochs(), strict=True):
            record["bytes_logical"] = info.bytes_logical
            record["bytes_unique"] = info.bytes_unique
            record["bytes_stored"] = info.bytes_stored
    records[-1]["files_bytes"] = sum(p.stat().st_size for p in Path(store).rglob("*"))
    for process in ranks:
        process.join(timeout=60)
    return records


def over_budget(folder: Path) -> dict[str, Any]:
    """A state of 1 GiB and 20,000 small arrays through a budget of 256 MiB, by one rank."""
    import groupio

    small = {f"small.{i}": np.arange(i % 50 + 1.0) for i in range(20_000)}
    state = {"large": np.random.default_rng(3).integers(0, 256, 1 << 30, dtype=np.uint8), **small}
    with tempfile.TemporaryDirectory() as runtime:
        settings = groupio.Settings(memory_bytes=256 * MIB, runtime_dir=runtime, idle_s=2.0)
        with groupio.connect(folder / "waves", rank=0, world_size=1, settings=settings) as client:
            times = client.save(state, epoch=1).wait("durable", timeout_s=300)
            found = {"budget_bytes": 256 * MIB, "released_s": times.released}
            environ = {**os.environ, "GROUPIO_RUNTIME_DIR": runtime}
            return found | agent_memory(environ)


def agent_memory(environ: dict[str, str] | None = None) -> dict[str, Any]:
    """Peak memory of the agent beside its budget."""
    answer = subprocess.run(
        [sys.executable, "-m", "groupio.cli", "status", "--json"],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
        env=environ,
    )
    agent = json.loads(answer.stdout)["agent"]
    status = Path(f"/proc/{agent['pid']}/status").read_text(encoding="ascii")
    peak = next(int(x.split()[1]) * 1024 for x in status.splitlines() if x.startswith("VmHWM"))
    return {"budget_bytes": agent["memory"]["budget"], "peak_rss_bytes": peak}


def start_times(runs: int = 7) -> dict[str, float]:
    """Medians of import and connect, each in a fresh interpreter, in seconds."""
    code = (
        "import time; t=time.perf_counter(); import groupio; i=time.perf_counter(); import sys;"
        "c=groupio.connect(sys.argv[1], rank=0, world_size=1); d=time.perf_counter();"
        "import numpy; n=time.perf_counter(); print(i-t, d-i, n-d); c.close()"
    )
    cold, warm = [], []
    with tempfile.TemporaryDirectory() as runtime:
        environ = {**os.environ, "GROUPIO_IDLE_S": "0.05"}
        for number in range(runs):
            environ["GROUPIO_RUNTIME_DIR"] = f"{runtime}/{number}"
            cold.append(_timed(code, f"{runtime}/store", environ))
        environ |= {"GROUPIO_IDLE_S": "20", "GROUPIO_RUNTIME_DIR": f"{runtime}/warm"}
        for _ in range(runs + 1):
            warm.append(_timed(code, f"{runtime}/store", environ))
    return {
        "import_groupio_s": statistics.median(row[0] for row in cold),
        "connect_starting_agent_s": statistics.median(row[1] for row in cold),
        "connect_running_agent_s": statistics.median(row[1] for row in warm[1:]),
        "import_numpy_s": statistics.median(row[2] for row in cold),
    }


def _timed(code: str, store: str, environ: dict[str, str]) -> list[float]:
    done = subprocess.run(
        [sys.executable, "-c", code, store],
        env=environ,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    return [float(word) for word in done.stdout.split()]


def summary(records: list[dict[str, Any]]) -> dict[str, float]:
    """The ratios that the project promises, as medians of the epochs after the first."""
    unique = [r for r in records if r["shape"] == "unique" and r["epoch"] > 1]
    equal = [r for r in records if r["shape"] == "equal"]
    one_copy = equal[0]["bytes_unique"]
    modes = unique[0]["raw_s"]
    raw = {m: statistics.median(r["raw_s"][m] for r in unique) for m in modes}
    durable = statistics.median(r["durable_s"] for r in unique)
    return {
        "first_stall_s": next(r for r in records if r["epoch"] == 1)["stall_s"],
        "limit_durable_s": min(raw.values()),
        "durable_s": durable,
        "stall_over_memcpy": statistics.median(r["stall_s"] / r["limit_stall_s"] for r in unique),
        "durable_over_raw": durable / min(raw.values()),
        "equal_stored_over_one_copy": equal[0]["bytes_stored"] / one_copy,
        "unchanged_epochs_stored_bytes": equal[-1]["files_bytes"] - equal[0]["bytes_stored"],
    }


def main() -> int:
    """Run all shapes and write the report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--mb-per-rank", type=int, default=256)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument(
        "--dir",
        default=tempfile.gettempdir(),
        help="a folder on the file system to measure (default: %(default)s)",
    )
    parser.add_argument("--json", help="write the report to this file")
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="groupio-bench-", dir=args.dir))
    with tempfile.TemporaryDirectory() as runtime:
        os.environ["GROUPIO_RUNTIME_DIR"] = runtime
        os.environ["GROUPIO_IDLE_S"] = "5"
        try:
            records = run_shape(args, "unique", folder)
            memory = agent_memory()
            records += run_shape(args, "equal", folder)
            waves = over_budget(folder)
            starts = start_times()
        finally:
            shutil.rmtree(folder)
    report = {
        "command": " ".join(["python", *sys.argv]),
        "machine": {
            "cpus": os.cpu_count(),
            "kernel": platform.release(),
            "python": platform.python_version(),
        },
        "ratios": summary(records),
        "agent_memory": memory,
        "state_larger_than_budget": waves,
        "start": starts,
        "records": records,
    }
    text = json.dumps(report, indent=1)
    if args.json:
        Path(args.json).write_text(text + "\n", encoding="utf-8")
    print(
        json.dumps(
            {k: report[k] for k in ("ratios", "agent_memory", "state_larger_than_budget", "start")},
            indent=1,
        )
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
