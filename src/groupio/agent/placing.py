"""Places new chunks in a segment: runs stay whole, small ones are packed.

A run is chunks of one item that follow each other in the arena, and they do so in the segment. A
large run has pages of its own and lies in them as it does in the arena, so that whole pages are
written from where they are. Small runs follow each other without a gap. In a framed segment the
header of a record stands directly before each run of a tensor that torch can read.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from groupio.format.frames import LOCAL_HEADER
from groupio.model import PACK_ITEM_BYTES, PAGE_BYTES


@dataclass(frozen=True, slots=True)
class NewChunks:
    """Chunks of one task that are to be written, at least one.

    ``starts`` and ``lengths`` int64[n] are bytes of the arena. ``first`` int64[r] is the first
    chunk of each run, ``framed`` bool[r] says which runs need a header.
    """

    starts: npt.NDArray[np.int64]
    lengths: npt.NDArray[np.int64]
    first: npt.NDArray[np.int64]
    framed: npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Placement:
    """Where new chunks go, relative to a page border.

    ``offsets`` int64[n] are those of the chunks. The runs, r of them, start at ``starts`` in the
    arena, have ``nbytes`` and, before them in the segment, ``leads`` bytes: their header and what
    puts them at the right place of a page. ``alone`` bool[r] have pages of their own. ``groups``
    int64[g] is the first run of each stretch of whole pages, ``sizes`` int64[g] are its bytes and
    ``total`` is the sum of them.
    """

    offsets: npt.NDArray[np.int64]
    starts: npt.NDArray[np.int64]
    nbytes: npt.NDArray[np.int64]
    leads: npt.NDArray[np.int64]
    framed: npt.NDArray[np.bool_]
    alone: npt.NDArray[np.bool_]
    groups: npt.NDArray[np.int64]
    sizes: npt.NDArray[np.int64]
    total: int


def find_runs(chunks: npt.NDArray[np.int64], items: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Where runs start among the chunks with these ascending numbers and items, int64[r]."""
    starts = np.ones(len(chunks), np.bool_)
    starts[1:] = (np.diff(chunks) != 1) | (np.diff(items) != 0)
    return np.flatnonzero(starts)


def place(new: NewChunks) -> Placement:
    """Place the runs of ``new`` one after the other."""
    starts = new.starts[new.first]
    nbytes = np.add.reduceat(new.lengths, new.first)
    alone = nbytes >= PACK_ITEM_BYTES
    header = len(LOCAL_HEADER) * new.framed
    phase = starts % PAGE_BYTES
    leads = np.where(alone, phase + PAGE_BYTES * (header > phase), header)

    opens = alone.copy()
    opens[1:] |= alone[:-1]
    opens[:1] = True
    groups = np.flatnonzero(opens)
    taken = leads + nbytes
    sizes = -(-np.add.reduceat(taken, groups) // PAGE_BYTES) * PAGE_BYTES
    before = np.cumsum(taken) - taken
    group_starts = np.cumsum(sizes) - sizes - before[groups]
    run_offsets = np.repeat(group_starts, np.diff(groups, append=len(nbytes))) + before + leads
    in_run = np.cumsum(new.lengths) - new.lengths
    run_offsets -= in_run[new.first]
    offsets = np.repeat(run_offsets, np.diff(new.first, append=len(new.lengths))) + in_run
    return Placement(
        offsets, starts, nbytes, leads, new.framed, alone, groups, sizes, int(sizes.sum())
    )
