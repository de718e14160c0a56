"""Four ranks save, one, two, three and eight load: FSDP2, HSDP, tensor parallelism and stages."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from reshard_worker import LOADERS, SAVERS

WORKER = Path(__file__).with_name("reshard_worker.py")


@pytest.mark.timeout(180)
def test_any_world_loads_what_four_ranks_saved(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(WORKER), str(tmp_path)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=170,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    names = [f"save_all-{SAVERS}-{rank}" for rank in range(SAVERS)]
    names += [f"load_all-{world}-{rank}" for world in LOADERS for rank in range(world)]
    found = {name: (tmp_path / f"{name}.txt").read_text() for name in names}
    problems = {name: text for name, text in found.items() if text}
    assert not problems, "\n".join(f"{k}: {v}" for k, v in problems.items())[:8000] + done.stdout
