"""The program of each rank of a benchmark: ``python -m groupio.bench.rank OPTIONS.json RANK
FOLDER``."""

from __future__ import annotations

import ctypes
import signal
import sys
import traceback
from pathlib import Path

import msgspec
import torch

from groupio.bench.load import load_again
from groupio.bench.news import News
from groupio.bench.options import Options
from groupio.bench.place import Place
from groupio.bench.save import save_all, save_once
from groupio.bench.step import train

_PR_SET_PDEATHSIG = 1

PROGRAMMES = {"save": save_all, "save_once": save_once, "load": load_again, "step": train}


def main(arguments: list[str]) -> int:
    """Run one programme on this rank; 1 after an error, whose last line is on stderr."""
    programme, options_file, rank_text, folder_text = arguments
    folder, rank = Path(folder_text), int(rank_text)
    options = msgspec.json.decode(Path(options_file).read_bytes(), type=Options)
    _end_with_parent()
    # As under torchrun: several ranks share the CPUs.
    torch.set_num_threads(1)
    ranks = options.load_ranks if programme == "load" else options.ranks
    news = News(folder, rank)
    try:
        place = Place(rank, ranks, folder, options.timeout_s)
        PROGRAMMES[programme](options, place, news)
        place.close()
    except Exception as error:  # noqa: BLE001  whatever it is, the launcher has to hear of it
        traceback.print_exc()
        lines = str(error).splitlines() or [""]
        news.tell("failed", error=f"{type(error).__name__}: {lines[0]}")
        return 1
    news.tell("done")
    return 0


def _end_with_parent() -> None:
    """Let the kernel end this rank when the launcher is gone, whatever became of that."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
