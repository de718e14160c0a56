"""What ``controller run`` says of mistakes; what it does is in tests/controller."""

from __future__ import annotations

from pathlib import Path

import pytest
from cli_help import Command
from store_maker import StoreMaker


def arguments(store: Path, *options: str) -> list[str]:
    listen = () if "--listen" in options else ("--listen", "127.0.0.1:0")
    return ["controller", "run", "--store", str(store), *listen, *options]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--listen", "127.0.0.1"), "has no port; write HOST:PORT"),
        (("--listen", "0.0.0.0:0"), "GROUPIO_TOKEN_FILE"),
        (("--coordinator", "tcp://a:1"), "is not etcd://HOST:PORT"),
        (("--coordinator", "etcd"), "which is not"),
    ],
)
def test_wrong_options(
    groupio: Command, tmp_path: Path, options: tuple[str, ...], words: str
) -> None:
    done = groupio(*arguments(tmp_path / "store", *options))
    assert (done.code, done.out) == (2, "")
    assert words in done.err


def test_a_store_that_cannot_be_made(groupio: Command, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no directory")
    done = groupio(*arguments(tmp_path / "file"))
    assert done.code == 2
    assert "file" in done.err


def test_the_store_of_another_job_is_refused_with_both_names(
    groupio: Command, maker: StoreMaker
) -> None:
    done = groupio(*arguments(maker.path, "--job", "other"))
    assert (done.code, done.out) == (2, "")
    assert "belongs to job " in done.err
    assert "--job says 'other'" in done.err
