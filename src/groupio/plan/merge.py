"""Equal digests are one chunk: the reports of all nodes as one table of unique chunks.

Everything here works on whole columns: 128,000 chunks take tens of milliseconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from groupio.errors import IntegrityError, InvalidInput, Retry
from groupio.model import DIGEST_BYTES, NodeReport

_COMPARED = 4096
"""So many digests are compared at a time: they stay in the processor's cache."""


@dataclass(frozen=True, slots=True)
class Merged:
    """The unique chunks of all reports, in the order in which they first appear.

    ``digests`` uint8[n, 32] and ``lengths`` int64[n] name them. ``rows[r]`` int64 maps the chunk
    rows of report ``r`` to them. ``holder_set`` int32[n] indexes ``holder_sets``, the different
    sets of reports (ascending indices into ``nodes``) that have a chunk.
    """

    nodes: tuple[str, ...]
    digests: npt.NDArray[np.uint8]
    lengths: npt.NDArray[np.int64]
    rows: tuple[npt.NDArray[np.int64], ...]
    holder_set: npt.NDArray[np.int32]
    holder_sets: tuple[tuple[int, ...], ...]


def merge(reports: Sequence[NodeReport]) -> Merged:
    """The unique chunks over all ``reports`` and who holds them.

    Raises InvalidInput when two reports are of one node or a member refers to a chunk that its
    report does not have, IntegrityError when one digest comes with two lengths.
    """
    nodes = tuple(report.node for report in reports)
    if len(set(nodes)) != len(nodes):
        raise InvalidInput(f"two reports are of the same node; the nodes are {nodes}")
    for report in reports:
        _check_refs(report)
    digests = _join([report.chunks.digests for report in reports], np.uint8, (0, DIGEST_BYTES))
    lengths = _join([report.chunks.lengths for report in reports], np.int64, (0,))
    leader, again = _first_equal(digests)
    _check_lengths(digests, lengths, leader, again)
    # One report without duplicates keeps its own arrays.
    first = _leading(len(leader), again) if len(again) else None
    number = np.arange(len(leader)) if first is None else _numbers(leader, first)
    borders = np.cumsum([len(report.chunks) for report in reports])
    rows = tuple(np.split(number, borders[:-1])) if reports else ()
    n = len(leader) - len(again)
    holder_set, holder_sets = find_holders(rows, n)
    return Merged(
        nodes=nodes,
        digests=digests if first is None else digests.take(first, axis=0),
        lengths=lengths if first is None else lengths[first],
        rows=rows,
        holder_set=holder_set,
        holder_sets=holder_sets,
    )


def find_rows(merged: Merged, digests: npt.NDArray[np.uint8]) -> npt.NDArray[np.int64]:
    """The unique chunks that ``digests`` (uint8[m, 32]) name: int64[m], -1 where there is none."""
    n = len(merged.lengths)
    leader, _ = _first_equal(np.concatenate((merged.digests, digests)))
    found = leader[n:]
    return np.where(found < n, found, -1)


def _check_refs(report: NodeReport) -> None:
    n = len(report.chunks)
    for member in report.members:
        refs = member.refs
        if len(refs) and not 0 <= int(refs.min()) <= int(refs.max()) < n:
            raise InvalidInput(
                f"member {member.rank} refers to chunk {int(refs.max())} of node {report.node},"
                f" which reports {n} chunks"
            )


def _join(parts: list[npt.NDArray[Any]], dtype: type, shape: tuple[int, ...]) -> npt.NDArray[Any]:
    if len(parts) == 1:
        return parts[0]
    return np.concatenate([np.empty(shape, dtype), *parts])


def _check_lengths(
    digests: npt.NDArray[np.uint8],
    lengths: npt.NDArray[np.int64],
    leader: npt.NDArray[np.int64],
    again: npt.NDArray[np.int64],
) -> None:
    wrong = again[lengths[leader[again]] != lengths[again]]
    if len(wrong):
        name = digests[wrong[0]].tobytes().hex()
        raise IntegrityError(
            f"chunk {name} is reported with {int(lengths[wrong[0]])} and with"
            f" {int(lengths[leader[wrong[0]]])} bytes; one of the agents is damaged",
            chunk=name,
            retry=Retry.WHOLE,
        )


def _leading(n: int, again: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """The rows, of ``n``, that are not among ``again``, ascending."""
    leads = np.ones(n, np.bool_)
    leads[again] = False
    return np.flatnonzero(leads)


def _numbers(leader: npt.NDArray[np.int64], first: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """The number of each row's value, where ``first`` are the rows that lead, ascending."""
    number = np.empty(len(leader), np.int64)
    number[first] = np.arange(len(first))
    numbers: npt.NDArray[np.int64] = number.take(leader)
    return numbers


def _first_equal(
    digests: npt.NDArray[np.uint8],
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """The first row that has the same digest, for each row; and the rows for which it is another,
    ascending."""
    n = len(digests)
    words = np.ascontiguousarray(digests).view(np.uint64).reshape(n, DIGEST_BYTES // 8)
    # Digests are random bytes, so that a part of the first word tells nearly all of them apart.
    # Its low bits make room for the row: one column of integers is sorted, and sorts stably.
    bits = np.uint64(n.bit_length())
    keys = words[:, 0] >> bits
    keys <<= bits
    keys |= np.arange(n, dtype=np.uint64)
    keys.sort()
    order = (keys & ((np.uint64(1) << bits) - np.uint64(1))).view(np.int64)
    keys >>= bits
    leader, again = _lead(order, keys[1:] == keys[:-1])
    if not _are_equal(words, again, leader):
        order = np.lexsort((np.arange(n), *words.T[::-1]))
        leader, again = _lead(order, (words[order[1:]] == words[order[:-1]]).all(axis=1))
    return leader, again


def _are_equal(
    words: npt.NDArray[np.uint64], again: npt.NDArray[np.int64], leader: npt.NDArray[np.int64]
) -> bool:
    """Whether each of the rows ``again`` equals its leader."""
    for start in range(0, len(again), _COMPARED):
        rows = again[start : start + _COMPARED]
        # ``take`` copies whole rows, several times faster than an index does.
        if not np.array_equal(words.take(rows, axis=0), words.take(leader[rows], axis=0)):
            return False
    return True


def _lead(
    order: npt.NDArray[np.int64], same: npt.NDArray[np.bool_]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """The same for rows in sorted ``order``, of which some are the ``same`` as the one before."""
    leader = np.arange(len(order))
    twins = np.flatnonzero(same) + 1
    # Twins in a row are one run, and the row before leads it.
    starts = np.flatnonzero(np.diff(twins, prepend=-1) != 1)
    rows = order[twins]
    leader[rows] = np.repeat(order[twins[starts] - 1], np.diff(starts, append=len(twins)))
    again = np.zeros(len(order), np.bool_)
    again[rows] = True
    return leader, np.flatnonzero(again)


def find_holders(
    rows: Sequence[npt.NDArray[np.int64]], n: int
) -> tuple[npt.NDArray[np.int32], tuple[tuple[int, ...], ...]]:
    """Which of ``n`` chunks the holders ``rows`` (chunk numbers, each int64) have in common.

    Returns int32[n], an index into the different sets of holders, which are numbered by first
    appearance: the same structure gives the same numbers in every epoch. A chunk that nobody holds
    has the empty set.
    """
    if len(rows) == 1 and len(rows[0]) == n:
        return np.zeros(n, np.int32), ((0,),)
    first, last = np.full((2, n), -1, np.int64)
    for holder, mine in enumerate(rows):
        last[mine] = holder
    for holder in reversed(range(len(rows))):
        first[rows[holder]] = holder
    # Most chunks have one holder; only for the others sets are compared.
    several = np.flatnonzero(first != last)
    codes, sets = _compare_sets(rows, several, n)
    code = last + 1
    code[several] = codes + len(rows) + 1
    known = [(), *((holder,) for holder in range(len(rows))), *sets]
    appears = np.full(len(known), n, np.int64)
    appears[code[::-1]] = np.arange(n)[::-1]
    by_row = np.argsort(appears, kind="stable")[: np.count_nonzero(appears < n)]
    number = np.zeros(len(known), np.int32)
    number[by_row] = np.arange(len(by_row), dtype=np.int32)
    return number.take(code), tuple(known[c] for c in by_row.tolist())


def _compare_sets(
    rows: Sequence[npt.NDArray[np.int64]], several: npt.NDArray[np.int64], n: int
) -> tuple[npt.NDArray[np.int64], list[tuple[int, ...]]]:
    """The number of the set of holders of each chunk in ``several``, and the sets."""
    count = len(several)
    if not count:
        return np.empty(0, np.int64), []
    place = np.full(n, -1, np.int64)
    place[several] = np.arange(count)
    # Eight holders are one byte; sets are told apart eight bytes at a time, so that each step
    # sorts one column of integers.
    masks = np.zeros((-(-len(rows) // 64), count), np.uint64)
    for holder, mine in enumerate(rows):
        at = mine
        if count < n:
            at = place.take(mine)
            at = at[at >= 0]
        masks[holder // 64][at] |= np.uint64(1 << holder % 64)
    code = np.zeros(count, np.int64)
    example = np.zeros(1, np.int64)
    for column in masks:
        if (column == column[0]).all():
            continue
        _, kinds = np.unique(column, return_inverse=True)
        _, example, code = np.unique(code * count + kinds, return_index=True, return_inverse=True)
    chosen = np.ascontiguousarray(masks[:, example].T)
    bits = np.unpackbits(chosen.view(np.uint8), axis=1, bitorder="little")
    return code, [tuple(np.flatnonzero(one).tolist()) for one in bits]
