"""A store with two epochs of two members, and the command line as a function."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from cli_help import Command, Outcome
from store_maker import StoreMaker, state

from groupio.cli import main


@pytest.fixture
def groupio(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Command:
    """Run ``groupio`` with these arguments, with an agent directory of its own."""
    monkeypatch.setenv("GROUPIO_RUNTIME_DIR", str(tmp_path / "runtime"))
    monkeypatch.setenv("COLUMNS", "200")

    def run(*arguments: object) -> Outcome:
        capsys.readouterr()
        code = main.run([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return Outcome(code, captured.out, captured.err)

    return run


@pytest.fixture
def maker(tmp_path: Path) -> Iterator[StoreMaker]:
    """A store with the epochs 10 and 20; 20 refers to chunks of 10."""
    made = StoreMaker(tmp_path / "store")
    made.commit(10, [state(0, 10), state(1, 10)], metadata={"note": "first"})
    made.commit(20, [state(0, 20), state(1, 20)])
    yield made
    made.close()
