"""Each example trains, resumes in a new process, and ends where an uninterrupted run ends."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
SCRIPTS = ("ddp", "fsdp2", "hf_trainer", "lightning_io", "titan_manager")
MOST_LINES = 10


@pytest.fixture(scope="module", autouse=True)
def own_agent() -> Iterator[None]:
    """The examples' agents live in a folder of their own, and end a moment after them."""
    with (
        tempfile.TemporaryDirectory(prefix="gx-", ignore_cleanup_errors=True) as folder,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv("GROUPIO_RUNTIME_DIR", folder)
        patch.setenv("GROUPIO_IDLE_S", "1")
        patch.setenv("GROUPIO_MEMORY_BYTES", "1G")
        patch.setenv("OMP_NUM_THREADS", "1")
        yield


def run(name: str, store: Path, *args: str, ranks: int = 0) -> str:
    """The last line that the example printed; ``ranks`` > 0 starts it with torchrun."""
    command = [sys.executable]
    if ranks:
        command += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command += [str(EXAMPLES / f"{name}.py"), str(store), *args]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stdout + done.stderr
    found = [line for line in done.stdout.splitlines() if line.startswith("step ")]
    assert found, done.stdout + done.stderr
    return found[-1]


@pytest.mark.parametrize("name", ["ddp", "fsdp2", "titan_manager"])
def test_a_job_of_two_ranks_goes_on_bit_for_bit(name: str, tmp_path: Path) -> None:
    whole = run(name, tmp_path / "whole", "--steps", "4", ranks=2)
    half = run(name, tmp_path / "halves", "--steps", "2", ranks=2)
    assert half.startswith("step 2 ")
    assert run(name, tmp_path / "halves", "--steps", "4", ranks=2) == whole
    assert whole.startswith("step 4 ")
    assert half.split()[-1] != whole.split()[-1]


@pytest.mark.proof
def test_a_sharded_job_goes_on_with_another_number_of_ranks(tmp_path: Path) -> None:
    run("fsdp2", tmp_path / "store", "--steps", "2", ranks=2)
    assert run("fsdp2", tmp_path / "store", "--steps", "3", ranks=1).startswith("step 3 ")
    # Nothing left to do: three ranks load what one saved, and find the same model.
    kept = run("fsdp2", tmp_path / "store", "--steps", "3", ranks=1)
    assert run("fsdp2", tmp_path / "store", "--steps", "3", ranks=3) == kept


def test_the_trainer_of_hugging_face_goes_on_bit_for_bit(tmp_path: Path) -> None:
    needs("transformers")
    needs("accelerate")
    whole = run("hf_trainer", tmp_path / "whole", "--steps", "6")
    half = run("hf_trainer", tmp_path / "halves", "--steps", "6", "--stop-at", "3")
    assert half.startswith("step 3 ")
    assert run("hf_trainer", tmp_path / "halves", "--steps", "6") == whole


def test_lightning_goes_on_bit_for_bit(tmp_path: Path) -> None:
    needs("pytorch_lightning")
    whole = run("lightning_io", tmp_path / "whole", "--steps", "4")
    run("lightning_io", tmp_path / "halves", "--steps", "2")
    assert run("lightning_io", tmp_path / "halves", "--steps", "4", "--resume", "2") == whole


@pytest.mark.parametrize("name", SCRIPTS)
def test_few_lines_change_and_the_docs_count_them(name: str) -> None:
    lines = (EXAMPLES / f"{name}.py").read_text().splitlines()
    changed = [line for line in lines if line.endswith("# +")]
    assert 0 < len(changed) <= MOST_LINES
    table = (ROOT / "docs" / "examples.md").read_text()
    row = re.search(rf"\|[^|]*examples/{name}\.py[^|]*\|[^|]*\| *(\d+) *\|", table)
    assert row is not None
    assert int(row[1]) == len(changed)


def needs(package: str) -> None:
    if find_spec(package) is None:
        pytest.skip(f"peer not installed: {package}")
