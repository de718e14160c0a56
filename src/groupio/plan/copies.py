"""Chooses the nodes that keep copies, so that k failure domains hold every chunk.

What several nodes hold anyway counts as copies; only chunks that too few domains hold move. Memory
for copies is reserved before anybody knows the contents. Each node therefore has *partners*: one or
more groups of k-1 nodes in other domains, each of which reserves room for an equal part of the
node's bytes. A chunk that any of its holders sends to the partners of that holder always fits.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite

import numpy as np
import numpy.typing as npt

from groupio.errors import InvalidInput
from groupio.model import CHUNK_BYTES, NodeLink
from groupio.plan.ordering import stable_order

PART_BYTES_MIN = 16 * CHUNK_BYTES
"""A node's bytes are divided among several groups of partners only in parts of at least this
size, so that the room that whole chunks need on top stays small."""

PASSES_MAX = 32
"""So often is room looked for away from the partners. One pass finds nearly all that there is; for
what is left between whole chunks a bound on the time matters more."""

Groups = tuple[tuple[tuple[int, ...], ...], ...]
"""Per node its groups of partners, each some numbers of nodes."""


@dataclass(frozen=True, slots=True)
class Copies:
    """Who sends which chunks to whom to keep.

    ``row`` int32[n] gives the row of each chunk. In row ``i`` are chunks with the same holders
    ``holder_set[i]`` (int32) that node ``sources[i]`` (int32, -1: nothing moves) sends to the nodes
    ``targets[i]``. ``sent`` and ``received`` int64[nodes] are the bytes that cross the
    fabric for that. ``short`` bool[n] marks chunks that fewer than k domains hold even then;
    ``lacking`` int64[nodes] is how much more room would let them be copied too.
    """

    row: npt.NDArray[np.int32]
    holder_set: npt.NDArray[np.int32]
    sources: npt.NDArray[np.int32]
    targets: tuple[tuple[int, ...], ...]
    sent: npt.NDArray[np.int64]
    received: npt.NDArray[np.int64]
    short: npt.NDArray[np.bool_]
    lacking: npt.NDArray[np.int64]


def domains_of(nodes: Sequence[NodeLink]) -> tuple[str, ...]:
    """The different failure domains of ``nodes``, in their order: k copies need k of them."""
    return tuple(dict.fromkeys(link.domain for link in nodes))


def record_keepers(nodes: Sequence[NodeLink], replicas: int) -> tuple[str, ...]:
    """The nodes that keep the sealed record: the first one of each of ``replicas`` domains."""
    first: dict[str, str] = {}
    for link in nodes:
        first.setdefault(link.domain, link.node)
    return tuple(first.values())[:replicas]


def replica_shares(
    bytes_by_node: Mapping[str, int], nodes: Sequence[NodeLink], replicas: int
) -> dict[str, int]:
    """Bytes to reserve on each of ``nodes`` for chunks of others, before contents are known.

    ``bytes_by_node`` is at least what the members of each node save. With these shares, the same
    nodes (in any order, with any speeds) and the same ``reserved`` bytes :func:`plan_copies` always
    finds room for all copies. Nodes that have nothing to save can keep copies too. Raises
    InvalidInput for bytes of a node that is not among ``nodes``.
    """
    unknown = sorted(set(bytes_by_node) - {link.node for link in nodes})
    if unknown:
        raise InvalidInput(f"bytes are saved on nodes {unknown}, which the group does not have")
    saved = np.array([bytes_by_node.get(link.node, 0) for link in nodes], np.int64)
    shares = np.zeros(len(nodes), np.int64)
    for nbytes, groups in zip(saved.tolist(), partners(saved, nodes, replicas), strict=True):
        for group in groups:
            shares[list(group)] += part_bytes(nbytes, len(groups))
    return {link.node: share for link, share in zip(nodes, shares.tolist(), strict=True)}


def part_bytes(nbytes: int, parts: int) -> int:
    """The most bytes of whole chunks in one of ``parts`` equal parts of ``nbytes``."""
    return nbytes if parts == 1 else -(-nbytes // parts) + CHUNK_BYTES


def partners(saved: npt.NDArray[np.int64], nodes: Sequence[NodeLink], replicas: int) -> Groups:
    """The groups of partners of each node: ``replicas - 1`` nodes in other domains than its own.

    ``saved`` int64[nodes] are the bytes that each node saves; a node with more than the average
    has more groups. Each group takes the nodes that have the least to receive so far; among equals
    the next ones by name. Groups are smaller where there are too few domains. Nodes whose fabric is
    not used have none and are nobody's. Neither the order of ``nodes`` nor the speeds of their
    links change anything: those are measured anew between admission and plan.
    """
    usable = np.array([link.fabric_ok for link in nodes], np.bool_)
    domain = _domain_numbers(nodes)
    average = max(int(saved.sum()), 1) / max(int(usable.sum()), 1)
    receives = np.zeros(len(nodes), np.int64)
    found: list[tuple[tuple[int, ...], ...]] = [()] * len(nodes)
    ring = sorted(range(len(nodes)), key=lambda number: nodes[number].node)
    for place, node in enumerate(ring):
        nbytes = int(saved[node])
        others = np.array(ring[place + 1 :] + ring[:place], np.int64)
        others = others[usable[others] & (domain[others] != domain[node])]
        if not (nbytes and usable[node] and len(others) and replicas > 1):
            continue
        parts = max(min(round(nbytes / average), nbytes // PART_BYTES_MIN, len(others)), 1)
        groups = []
        for _ in range(parts):
            group = _next_group(others, domain, receives, replicas - 1)
            receives[group] += part_bytes(nbytes, parts)
            groups.append(tuple(group))
        found[node] = tuple(groups)
    return tuple(found)


def plan_copies(
    lengths: npt.NDArray[np.int64],
    holder_set: npt.NDArray[np.int32],
    holder_sets: Sequence[tuple[int, ...]],
    nodes: Sequence[NodeLink],
    *,
    replicas: int,
    reserved: npt.NDArray[np.int64],
    room: npt.NDArray[np.int64],
) -> Copies:
    """Copies for all chunks that nodes of fewer than ``replicas`` failure domains hold.

    Chunk ``c`` of ``lengths[c]`` bytes is held by the nodes ``holder_sets[holder_set[c]]``.
    ``reserved`` int64[nodes] are the bytes that :func:`replica_shares` was given, ``room``
    int64[nodes] what each node has for copies still to come: never is more than that planned.
    Where the partners of a chunk's holders have no room, any other node in another domain that has
    room is taken; where there is none the chunk is ``short``. Nodes whose fabric is not used
    neither send nor receive. Raises InvalidInput for a fabric without a positive bandwidth.
    """
    for link in nodes:
        if link.fabric_ok and not (
            isfinite(link.fabric_bytes_per_s) and link.fabric_bytes_per_s > 0
        ):
            raise InvalidInput(
                f"the fabric of node {link.node} has a bandwidth of {link.fabric_bytes_per_s}"
                " bytes/s; it must be a positive number"
            )
    placing = _Placing(lengths, holder_set, holder_sets, nodes, replicas)
    sends = [[h for h in holders if nodes[h].fabric_ok] for holders in holder_sets]
    able = np.array([bool(senders) for senders in sends], np.bool_)
    lacking = (placing.need > 0) & able
    if lacking.any():
        groups = partners(reserved, nodes, replicas)
        rest = placing.without_choice(lacking, groups)
        placing.to_partners(np.flatnonzero(rest[holder_set]), groups, _rates(nodes))
        left = placing.within(room)
        placing.elsewhere(lacking, sends, left)
        return placing.done(placing.more_room(lacking, sends, left))
    return placing.done(np.zeros(len(nodes), np.int64))


class _Placing:
    """The rows of :class:`Copies` while they are made. At first row ``s`` is holder set ``s``."""

    def __init__(
        self,
        lengths: npt.NDArray[np.int64],
        holder_set: npt.NDArray[np.int32],
        holder_sets: Sequence[tuple[int, ...]],
        nodes: Sequence[NodeLink],
        replicas: int,
    ) -> None:
        self.lengths = lengths
        self._weights = lengths.astype(np.float64)
        self._in_rows: npt.NDArray[np.int64] | None = None
        self.holder_set = holder_set
        self.holder_sets = holder_sets
        self.usable = np.array([link.fabric_ok for link in nodes], np.bool_)
        self.domain = _domain_numbers(nodes)
        self.domains = [{int(self.domain[h]) for h in holders} for holders in holder_sets]
        need = [max(replicas - len(d), 0) if replicas > 1 else 0 for d in self.domains]
        self.need = np.array(need, np.int64)
        self.row = holder_set.astype(np.int32)
        self.rows: list[tuple[int, int, tuple[int, ...]]] = [
            (s, -1, ()) for s in range(len(holder_sets))
        ]
        self.numbers = {row: number for number, row in enumerate(self.rows)}

    def number(self, of_set: int, source: int, targets: tuple[int, ...]) -> int:
        """The number of this row, which is made if there is none."""
        row = (of_set, source, targets)
        if row not in self.numbers:
            self.numbers[row] = len(self.rows)
            self.rows.append(row)
        return self.numbers[row]

    def without_choice(
        self, lacking: npt.NDArray[np.bool_], groups: Groups
    ) -> npt.NDArray[np.bool_]:
        """Send what only one node with one group of partners has, whole holder sets at once.

        Of the ``lacking`` holder sets (bool[sets]) returns the others.
        """
        number = np.arange(len(self.rows), dtype=np.int32)
        rest = lacking.copy()
        for s in np.flatnonzero(lacking).tolist():
            senders = [h for h in self.holder_sets[s] if groups[h]]
            if len(senders) == 1 and len(groups[senders[0]]) == 1:
                number[s] = self.number(s, senders[0], self._missing(s, groups[senders[0]][0]))
                rest[s] = False
        self._move(slice(None), number[self.row])
        return rest

    def _move(
        self, chunks: npt.NDArray[np.int64] | slice, rows: npt.NDArray[np.int32] | int
    ) -> None:
        """From now on these chunks are in these rows."""
        self.row[chunks] = rows
        self._in_rows = None

    def _row_bytes(self) -> npt.NDArray[np.int64]:
        """The bytes of the chunks of each row: int64[rows], 0 for rows that have none."""
        if self._in_rows is None or len(self._in_rows) < len(self.rows):
            found = np.bincount(self.row, self._weights, len(self.rows))
            self._in_rows = found.astype(np.int64)
        return self._in_rows

    def to_partners(
        self, moved: npt.NDArray[np.int64], groups: Groups, rates: npt.NDArray[np.float64]
    ) -> None:
        """Each holder sends an even share of the chunks ``moved`` to its groups of partners."""
        order = stable_order(self.holder_set[moved])
        chunks = moved[order]
        sets, senders, borders = self._divide(chunks, groups, rates)
        # Chunks that no holder with partners has stay where they are.
        numbers = np.arange(len(self.holder_sets))
        first, end = (np.searchsorted(sets, numbers, side=side) for side in ("left", "right"))
        sent_on = (end > first)[self.holder_set[chunks]]
        chunks = chunks if sent_on.all() else chunks[sent_on]
        if not len(chunks):
            return
        spans = self.lengths[chunks]
        middles = np.cumsum(spans) - spans / 2
        # In how many pairs each chunk is behind: both ascend, and there are few borders.
        cuts = np.searchsorted(middles, borders[:-1], side="left")
        pair = np.repeat(np.arange(len(borders)), np.diff(cuts, prepend=0, append=len(chunks)))
        # Rounding must not send a chunk from a node that does not have it.
        of_set = self.holder_set[chunks]
        pair = np.minimum(np.maximum(pair, first[of_set]), end[of_set] - 1)
        order = stable_order(senders[pair])
        chunks, pair = chunks[order], pair[order]
        sender = senders[pair]
        spans = self.lengths[chunks]
        begins = np.cumsum(spans) - spans
        sent = np.bincount(sender, spans, len(groups)).astype(np.int64)
        begins -= (np.cumsum(sent) - sent)[sender]
        parts = np.array([len(mine) for mine in groups], np.int64)
        part = begins * parts[sender] // sent[sender]
        width = int(parts.max())
        kinds = pair * width + part
        used = np.flatnonzero(np.bincount(kinds))
        rows = np.zeros(len(senders) * width, np.int32)
        for kind in used.tolist():
            s, source = int(sets[kind // width]), int(senders[kind // width])
            targets = self._missing(s, groups[source][kind % width])
            rows[kind] = self.number(s, source, targets)
        self._move(chunks, rows[kinds])

    def _divide(
        self, chunks: npt.NDArray[np.int64], groups: Groups, rates: npt.NDArray[np.float64]
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.float64]]:
        """Which bytes of each holder set each of its holders sends.

        Pair ``i`` is (holder set, sender); the bytes of all sets stand in one row, and those of
        pair ``i`` end at the border ``i``.
        """
        amounts = np.bincount(self.holder_set[chunks], self.lengths[chunks], len(self.holder_sets))
        senders = {
            s: np.array([h for h in self.holder_sets[s] if groups[h]], np.int64)
            for s in np.flatnonzero(amounts).tolist()
        }
        busy = np.zeros(len(groups), np.float64)
        quotas = {}
        for s in sorted(senders, key=lambda s: (len(senders[s]), s)):
            here = senders[s]
            if len(here):
                quotas[s] = level(busy[here], rates[here], float(amounts[s]))
                busy[here] += quotas[s] / rates[here]
        ordered = sorted(quotas)
        none = np.empty(0, np.int64)
        return (
            np.repeat(np.array(ordered, np.int64), [len(quotas[s]) for s in ordered]),
            np.concatenate([none, *(senders[s] for s in ordered)]),
            np.cumsum(np.concatenate([none, *(quotas[s] for s in ordered)])),
        )

    def _missing(self, of_set: int, group: tuple[int, ...]) -> tuple[int, ...]:
        """Those of a group of partners that chunks of this holder set still need."""
        there = self.domains[of_set]
        fresh = [node for node in group if int(self.domain[node]) not in there]
        return tuple(sorted(fresh[: self.need[of_set]]))

    def within(self, room: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Take back what exceeds the room of a node; returns what room is left."""
        left = room - self._crossing()[1]
        if (left >= 0).all():
            return left
        for node in np.flatnonzero(left < 0).tolist():
            sending = [n for n, (_, _, targets) in enumerate(self.rows) if node in targets]
            chunks = np.flatnonzero(np.isin(self.row, sending))
            over = chunks[np.cumsum(self.lengths[chunks]) > room[node]]
            for number in np.unique(self.row[over]).tolist():
                of_set, source, targets = self.rows[number]
                rest = tuple(other for other in targets if other != node)
                back = over[self.row[over] == number]
                self._move(back, self.number(of_set, source, rest))
        return room - self._crossing()[1]

    def _crossing(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """The bytes that each node sends and receives."""
        sent, received = np.zeros((2, len(self.usable)), np.int64)
        if len(self.rows) > len(self.holder_sets):
            amounts = self._row_bytes().tolist()
            for (_, source, targets), amount in zip(self.rows, amounts, strict=True):
                sent[source] += amount * len(targets)
                received[list(targets)] += amount
        return sent, received

    def elsewhere(
        self,
        able: npt.NDArray[np.bool_],
        sends: Sequence[Sequence[int]],
        left: npt.NDArray[np.int64],
    ) -> None:
        """Find other nodes with room ``left`` for what still has too few copies."""
        for _ in range(PASSES_MAX):
            placed = False
            sets = np.array([s for s, _, _ in self.rows], np.int64)
            wanting = self._short_rows() & able[sets]
            if not wanting.any():
                break
            lacking = np.flatnonzero(wanting[self.row])
            lacking = lacking[stable_order(self.row[lacking])]
            borders = np.flatnonzero(np.diff(self.row[lacking])) + 1
            for chunks in np.split(lacking, borders):
                placed |= self._one_more(chunks, sends, left)
            if not placed:
                break

    def _one_more(
        self,
        chunks: npt.NDArray[np.int64],
        sends: Sequence[Sequence[int]],
        left: npt.NDArray[np.int64],
    ) -> bool:
        """One more copy of these chunks of one row, as far as there is room; False: none fits."""
        of_set, source, targets = self.rows[self.row[chunks[0]]]
        if source < 0:
            source = sends[of_set][0]
        there = self.domains[of_set] | {int(self.domain[node]) for node in targets}
        fresh = self.usable & ~np.isin(self.domain, list(there))
        # Those that have room for the longest chunk that fits anywhere: each can take any chunk.
        chunks = chunks[self.lengths[chunks] <= np.max(left[fresh], initial=0)]
        spans = self.lengths[chunks]
        nodes = np.flatnonzero(fresh & (left >= np.max(spans, initial=1)))
        # Each takes in proportion to its room; where all of it is needed, whole chunks only.
        ends = np.cumsum(left[nodes].astype(np.float64))
        if len(nodes) and ends[-1] > spans.sum():
            ends *= spans.sum() / ends[-1]
        taker = np.searchsorted(ends, np.cumsum(spans) - spans / 2, side="right")
        placed = False
        for i, node in enumerate(nodes.tolist()):
            mine = chunks[taker == i]
            mine = mine[np.cumsum(self.lengths[mine]) <= left[node]]
            if len(mine):
                left[node] -= self.lengths[mine].sum()
                self._move(mine, self.number(of_set, source, tuple(sorted((*targets, node)))))
                placed = True
        return placed

    def more_room(
        self,
        able: npt.NDArray[np.bool_],
        sends: Sequence[Sequence[int]],
        left: npt.NDArray[np.int64],
    ) -> npt.NDArray[np.int64]:
        """How much more than ``left`` each node needs so that nothing is short, int64[nodes]."""
        if not self._short_rows().any():
            return np.zeros_like(left)
        short = self._short()
        trial = copy.copy(self)
        trial.row, trial.rows, trial.numbers = self.row.copy(), [*self.rows], {**self.numbers}
        # The same for all: who has how much free memory is not known here.
        plenty = np.full(len(left), len(left) * int(self.lengths[short].sum()), np.int64)
        rest = plenty.copy()
        trial.elsewhere(able, sends, rest)
        used = plenty - rest
        # With the longest chunk on top, what is left between whole chunks never matters.
        return np.where(used > 0, np.maximum(used - left, 0) + self.lengths[short].max(), 0)

    def _short(self) -> npt.NDArray[np.bool_]:
        """Chunks that have too few copies so far, bool[n]."""
        rows = self._short_rows()
        return rows[self.row] if rows.any() else np.zeros(len(self.row), np.bool_)

    def _short_rows(self) -> npt.NDArray[np.bool_]:
        """The rows that have chunks, with too few copies so far: bool[rows]."""
        kept = np.array([len(targets) for _, _, targets in self.rows], np.int64)
        sets = np.array([s for s, _, _ in self.rows], np.int64)
        short: npt.NDArray[np.bool_] = kept < self.need[sets]
        return short & (self._row_bytes() > 0) if short.any() else short

    def done(self, lacking: npt.NDArray[np.int64]) -> Copies:
        """The finished table."""
        sets = np.array([s for s, _, _ in self.rows], np.int32)
        targets = tuple(targets for _, _, targets in self.rows)
        sent, received = self._crossing()
        return Copies(
            row=self.row,
            holder_set=sets,
            sources=np.array([source for _, source, _ in self.rows], np.int32),
            targets=targets,
            sent=sent,
            received=received,
            short=self._short(),
            lacking=lacking,
        )


def level(
    busy: npt.NDArray[np.float64], rates: npt.NDArray[np.float64], amount: float
) -> npt.NDArray[np.float64]:
    """How many of ``amount`` bytes each gets so that all are done at one time, like water.

    ``busy`` says in seconds when each would be free, ``rates`` are bytes/s.
    """
    order = np.argsort(busy, kind="stable")
    levels = (amount + np.cumsum(busy[order] * rates[order])) / np.cumsum(rates[order])
    # The lowest of these is the one at which those that are busy for longer get nothing.
    filled: npt.NDArray[np.float64] = np.maximum(levels.min() - busy, 0) * rates
    return filled


def _next_group(
    others: npt.NDArray[np.int64],
    domain: npt.NDArray[np.int64],
    receives: npt.NDArray[np.int64],
    size: int,
) -> list[int]:
    group: list[int] = []
    while len(others) and len(group) < size:
        group.append(int(others[np.argmin(receives[others])]))
        others = others[domain[others] != domain[group[-1]]]
    return group


def _domain_numbers(nodes: Sequence[NodeLink]) -> npt.NDArray[np.int64]:
    numbers = {domain: number for number, domain in enumerate(domains_of(nodes))}
    return np.array([numbers[link.domain] for link in nodes], np.int64)


def _rates(nodes: Sequence[NodeLink]) -> npt.NDArray[np.float64]:
    # What a port that is not used has never counts.
    return np.array([n.fabric_bytes_per_s if n.fabric_ok else 1.0 for n in nodes], np.float64)
