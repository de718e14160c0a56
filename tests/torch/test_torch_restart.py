"""A rank is replaced while the others live on, in their processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from groupio.client.store_reader import StoreReader

WORKER = Path(__file__).with_name("restart_worker.py")


@pytest.mark.timeout(180)
def test_survivors_go_on_with_a_new_process(tmp_path: Path) -> None:
    """Whatever each had loaded before; the replaced process comes back, and is refused."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    logs = {name: tmp_path / f"{name}.log" for name in "abcd"}
    processes = []
    for name, log in logs.items():
        command = [sys.executable, str(WORKER), name, str(tmp_path), str(server.port)]
        with log.open("w") as out:
            processes.append(subprocess.Popen(command, env=environ, stdout=out, stderr=out))
    try:
        codes = [process.wait(150) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait(10)
    assert codes == [0] * 4, "\n".join(log.read_text()[-3000:] for log in logs.values())
    a, b, c, d = (json.loads((tmp_path / f"{name}.json").read_text()) for name in "abcd")
    assert a["alone"] == "GroupTimeout"
    assert b["wrong"] == ["InvalidInput"] * 2
    assert [one["first"] for one in (a, b, c)] == ["NotFound"] * 3
    assert [one["loaded"] for one in (a, b, d)] == [1] * 3
    assert [one["loaded again"] for one in (a, b, d)] == [5] * 3
    assert c["late"] == ["LateMember"]
    with StoreReader.open(str(tmp_path / "store")) as reader:
        headers = [reader.resolve(step).header for step in range(1, 6)]
    assert [header.incarnation for header in headers] == [1, 2, 2, 2, 2]
