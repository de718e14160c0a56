"""The demonstration itself, with a small model: a real SIGKILL, a real resumption, the proof."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.proof  # `make demo` is run by whoever runs `make test`
@pytest.mark.timeout(300)
def test_a_small_demonstration_is_proven(tmp_path: Path) -> None:
    command = [
        *(sys.executable, "-m", "groupio.demo", "--ranks", "2"),
        *("--steps", "3", "--save-every", "1", "--layers", "1", "--width", "64"),
        *("--dir", str(tmp_path / "demo"), "--json"),
    ]
    environ = {**os.environ, "GROUPIO_IDLE_S": "1"}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-4000:]
    answer = json.loads(done.stdout)
    assert answer["proven"]
    assert answer["killed_step"] == 2
    assert answer["losses"]["interrupted"]["2"] == answer["losses"]["control"]["2"]
    assert answer["losses"]["resumed"] == {
        step: answer["losses"]["control"][step] for step in ("2", "3")
    }
    report = Path(answer["report"]).read_text(encoding="utf-8")
    assert "bit for bit: proven" in report
    # Without --keep only the report is left.
    assert [path.name for path in (tmp_path / "demo").iterdir()] == ["report.html"]
    for words in ("kills itself with SIGKILL", "GroupAborted", "1 of 4", "4 of 4", "dcp.save"):
        assert words in done.stderr
