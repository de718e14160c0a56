"""Whatever comes from a store or a socket with right digests, only typed errors come out."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import parsers
import pytest
from parse_calls import parsing_functions
from parse_table import FUZZED, TRUSTED
from parsers import SECONDS_MAX, run, targets

COUNT = 1_000_000
MEMORY_BYTES = 1 << 30


def test_a_sample_of_each_parser(tmp_path: Path) -> None:
    all_of_them = targets(str(tmp_path / "other"))
    report = run(60 * len(all_of_them), 0, str(tmp_path / "keys"))
    assert report.escaped == {}
    assert report.slowest_s < SECONDS_MAX, report.slowest
    # Inputs that are all refused at the door would test nothing behind it.
    assert set(report.accepted) == set(all_of_them)


def test_no_parser_is_forgotten(tmp_path: Path) -> None:
    listed = [name for table in (FUZZED, TRUSTED) for row in table.values() for name in row]
    assert len(listed) == len(set(listed))
    found = parsing_functions()
    assert found - set(listed) == set(), "add them to parse_table.py, and what is missing there"
    assert set(listed) - found == set(), "these parse nothing any more"
    assert set(FUZZED) <= set(targets(str(tmp_path / "keys")))


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
