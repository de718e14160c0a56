"""Golden transcripts: what the machines do, story by story, in the folder ``transcripts``."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from interpreter import replay
from interpreter_nodes import NodesInterpreter

STORIES = sorted((Path(__file__).parent / "transcripts").glob("*.txt"))


@pytest.mark.parametrize("path", STORIES, ids=[path.stem for path in STORIES])
def test_story(path: Path) -> None:
    seen = replay(path, NodesInterpreter())
    if os.environ.get("GROUPIO_REWRITE") == "1":
        path.write_text(seen, encoding="utf-8")
    assert seen.splitlines() == path.read_text(encoding="utf-8").splitlines()
