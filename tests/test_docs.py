"""The documentation is true where a machine can tell: its code runs, its links lead somewhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from groupio.cli import main

ROOT = Path(__file__).resolve().parents[1]
DOCS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
BLOCK = re.compile(r"^```python\n(.*?)^```", re.M | re.S)
LINK = re.compile(r"\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.+)$", re.M)

BLOCKS = [
    pytest.param(block, id=f"{path.name}-{number}")
    for path in DOCS
    for number, block in enumerate(BLOCK.findall(path.read_text(encoding="utf-8")))
]


def anchor(heading: str) -> str:
    """The fragment by which a heading is linked to."""
    words = re.sub(r"[^\w\s-]", "", heading.lower())
    return re.sub(r"\s", "-", words.strip())


def outside_code(text: str) -> str:
    return re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)


@pytest.mark.parametrize("block", BLOCKS)
def test_python_blocks_run(block: str, tmp_path: Path) -> None:
    environment = {
        **os.environ,
        "GROUPIO_RUNTIME_DIR": str(tmp_path / "runtime"),
        "GROUPIO_IDLE_S": "0.1",
        "GROUPIO_MEMORY_BYTES": "256M",
        "PYTHONPATH": str(ROOT / "src"),
    }
    try:
        done = subprocess.run(
            [sys.executable, "-W", "error::SyntaxWarning", "-c", block],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=150,
            check=False,
        )
    finally:
        subprocess.run(
            [sys.executable, "-m", "groupio.cli", "agent", "stop"],
            env=environment,
            capture_output=True,
            timeout=90,
            check=True,
        )
    assert done.returncode == 0, done.stderr


def test_the_readme_has_runnable_blocks() -> None:
    assert sum(param.id.startswith("README") for param in BLOCKS) >= 2


@pytest.mark.parametrize("path", DOCS, ids=lambda path: path.name)
def test_links_lead_somewhere(path: Path) -> None:
    for target in LINK.findall(outside_code(path.read_text(encoding="utf-8"))):
        if target.startswith(("http://", "https://")):
            continue
        file, _, fragment = target.partition("#")
        other = (path.parent / file) if file else path
        assert other.exists(), f"{path.name}: {target}"
        if fragment:
            headings = HEADING.findall(other.read_text(encoding="utf-8"))
            assert fragment in {anchor(heading) for heading in headings}, f"{path.name}: {target}"


def test_every_command_and_option_is_documented(capsys: pytest.CaptureFixture[str]) -> None:
    text = (ROOT / "docs/cli.md").read_text(encoding="utf-8")
    commands = ["ls", "show", "verify", "export", "status", "doctor"]
    for words in [[name] for name in commands] + [["agent", n] for n in ("run", "drain", "stop")]:
        capsys.readouterr()
        assert main.run([*words, "--help"]) == 0
        options = set(re.findall(r"--[a-z][a-z-]+", capsys.readouterr().out)) - {"--help"}
        assert "--json" in options
        found = re.search(rf"^groupio {words[0]} .*(?:\n(?: |groupio {words[0]} ).*)*", text, re.M)
        assert found is not None, words
        usage = found.group()
        for option in options - {"--json"}:
            assert option in usage, f"{' '.join(words)} {option}"
        assert f"groupio/{'-'.join(words)}/1" in text


def test_the_readme_names_every_command() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    for command in ("ls", "show", "verify", "export", "status", "doctor"):
        assert f"groupio {command} " in text
