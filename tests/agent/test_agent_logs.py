"""The log: private, rotated, and nothing that is printed gets lost."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from agent_tools import WAIT_S


def test_the_log_is_rotated_and_stray_output_follows(tmp_path: Path) -> None:
    log = tmp_path / "agent.log"
    code = (
        "import logging, os, sys\n"
        "from pathlib import Path\n"
        "from groupio.agent import logs\n"
        "logs.LOG_BYTES_MAX = 2000\n"
        "logs.set_up_log(Path(sys.argv[1]), 'info', capture_stdio=True)\n"
        "logging.debug('not this')\n"
        "for i in range(100): logging.info('line %d', i)\n"
        "logging.info('undecodable: %s', '\\udcff')\n"
        "os.write(2, b'stray words\\n')\n"
    )
    subprocess.run([sys.executable, "-c", code, str(log)], check=True, timeout=WAIT_S)
    files = sorted(p.name for p in tmp_path.iterdir())
    assert files == ["agent.log", "agent.log.1", "agent.log.2", "agent.log.3"]
    assert all(p.stat().st_size < 3000 for p in tmp_path.iterdir())
    assert all(p.stat().st_mode & 0o777 == 0o600 for p in tmp_path.iterdir())
    text = log.read_text()
    assert "stray words" in text
    assert "undecodable: \\udcff" in text
    everything = "".join(p.read_text() for p in tmp_path.iterdir())
    assert "not this" not in everything
    assert " INFO " in text
    assert "line 99" in everything
