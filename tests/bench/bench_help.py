"""What the tests of the benchmark share: running it, and the options of a tiny run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from groupio.bench.options import Options

SOURCE = Path(__file__).resolve().parents[2] / "src"


@dataclass
class Bench:
    """One finished ``groupio bench``."""

    code: int
    out: str
    err: str
    records: list[dict[str, Any]]
    html: str
    left: list[str]
    """What it left in the folder that it measured in."""

    def of(self, system: str, **fields: Any) -> list[dict[str, Any]]:
        return [
            r
            for r in self.records
            if r["system"] == system and all(r[key] == value for key, value in fields.items())
        ]


def run_bench(folder: Path, command: str, *arguments: str) -> Bench:
    """Run the command line in a process of its own, measuring in ``folder``."""
    store = folder / "measured"
    store.mkdir()
    found = subprocess.run(
        [
            *(sys.executable, "-m", "groupio.cli", "bench", command, "--store", str(store)),
            *("--json", str(folder / "records.json"), *arguments),
        ],
        env={**os.environ, "PYTHONPATH": str(SOURCE), "COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
    )
    records_file, html_file = folder / "records.json", folder / "report.html"
    return Bench(
        found.returncode,
        found.stdout,
        found.stderr,
        json.loads(records_file.read_text()) if records_file.exists() else [],
        html_file.read_text() if html_file.exists() else "",
        os.listdir(store),
    )


def options(**fields: Any) -> Options:
    """Options of a small run."""
    base: dict[str, Any] = {
        "command": "save",
        "shape": "ddp",
        "systems": ("groupio", "groupio_nodoor", "dcp"),
        "ranks": 1,
        "mb_per_rank": 1,
        "epochs": 2,
        "folder": "",
        "timeout_s": 60.0,
        "settle_s": 0.0,
    }
    return Options(**{**base, **fields})
