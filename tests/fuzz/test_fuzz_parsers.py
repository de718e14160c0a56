"""Whatever comes from a store or a socket with right digests, only typed errors come out."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import parsers
import pytest
from parsers import SECONDS_MAX, run, targets

COUNT = 1_000_000
MEMORY_BYTES = 1 << 30


def test_a_sample_of_each_parser(tmp_path: Path) -> None:
    report = run(60 * 21, 0, str(tmp_path / "keys"))
    assert report.escaped == {}
    assert report.slowest_s < SECONDS_MAX, report.slowest
    # Inputs that are all refused at the door would test nothing behind it.
    unknown_keys = {"fabric handshake"}
    assert set(report.accepted) == set(targets(str(tmp_path / "other"))) - unknown_keys


def test_what_escapes_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parsers, "decode_plain", lambda data: {}[data])
    report = run(3, 0, str(tmp_path / "keys"), only="plain value")
    assert list(report.escaped) == ["plain value: KeyError"]


@pytest.mark.proof
def test_a_million_inputs_in_bounded_memory(tmp_path: Path) -> None:
    words = [sys.executable, "parsers.py", str(COUNT), "0", str(tmp_path / "keys")]
    folder = Path(__file__).parent
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, check=True)
    report = json.loads(done.stdout)
    assert report["escaped"] == {}
    assert report["inputs"] >= COUNT
    assert report["slowest_s"] < SECONDS_MAX, report["slowest"]
    assert report["peak_bytes"] < MEMORY_BYTES
