"""Text that every machine has: the source of the Python standard library, byte by byte."""

from __future__ import annotations

import random
import sysconfig
from pathlib import Path

import torch

TEXT_BYTES = 8 << 20


def read_text(limit: int = TEXT_BYTES) -> torch.Tensor:
    """The first ``limit`` bytes of the library's modules, in the order of their names: uint8[n].

    It is the same in every process of one installation.
    """
    folder = Path(sysconfig.get_path("stdlib"))
    parts = bytearray()
    for path in sorted(folder.glob("*.py")) + sorted(folder.glob("*/*.py")):
        if "site-packages" in path.parts:
            continue
        parts += path.read_bytes()
        if len(parts) >= limit:
            break
    return torch.frombuffer(parts[:limit], dtype=torch.uint8)


class Batches:
    """Random windows of the text; which ones depends on ``random`` alone.

    ``position`` counts the windows drawn by this rank.
    """

    def __init__(self, text: torch.Tensor, batch: int, context: int) -> None:
        self.text, self.batch, self.context = text, batch, context
        self.position = 0

    def next(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens and the tokens that follow them, both int64[batch, context]."""
        last = len(self.text) - self.context - 1
        starts = [random.randrange(last) for _ in range(self.batch)]
        self.position += self.batch
        windows = torch.stack([self.text[s : s + self.context + 1] for s in starts]).long()
        return windows[:, :-1], windows[:, 1:]
