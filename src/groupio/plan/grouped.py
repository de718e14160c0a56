"""The plan of a group that spans nodes: who writes, sends and keeps which chunks.

The reports are merged (:mod:`groupio.plan.merge`), copies are placed (:mod:`groupio.plan.copies`),
and whoever then holds a chunk may write it (:mod:`groupio.plan.write`); more moves only if that
shortens the flush. The result is one order per node.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
from blake3 import blake3

from groupio.errors import IntegrityError, InvalidInput, Retry
from groupio.model import NodeLink, NodeReport
from groupio.plan.bundles import bundle
from groupio.plan.cache import PlanCache
from groupio.plan.copies import Copies, plan_copies, record_keepers
from groupio.plan.dedup import fingerprint
from groupio.plan.holding import Holding, find_holding
from groupio.plan.merge import Merged, merge
from groupio.plan.orders import Fetch, NodeOrder, Transfers, give_orders
from groupio.plan.write import FlushPlan, WriteClasses, assign_flush, plan_flush

__all__ = ["Fetch", "GroupPlan", "Missing", "NodeOrder", "missing_chunks", "plan_group"]


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """What each live node does, by its name.

    ``makespan_s`` is when the slowest link (the backend is one) has carried its bytes,
    ``moved_bytes`` what crosses the fabric only to be written, ``replica_bytes`` what crosses it to
    be kept. ``short_bytes`` are in chunks that too few failure domains hold even then: while there
    are any the group is not REPLICATED. ``notes`` are sentences for the timeline. ``reused``: the
    split over the links is that of an earlier epoch. ``room`` are the replica bytes that nodes
    would need in all, where more would leave fewer chunks short.
    """

    orders: dict[str, NodeOrder]
    makespan_s: float
    moved_bytes: int
    replica_bytes: int
    short_bytes: int
    notes: tuple[str, ...]
    reused: bool
    room: Mapping[str, int] = field(default_factory=dict)


class Missing(NamedTuple):
    """How many chunks have no copy left, their bytes, and the lost nodes that had them."""

    chunks: int
    bytes: int
    nodes: tuple[str, ...]


def plan_group(
    reports: Sequence[NodeReport],
    nodes: Sequence[NodeLink],
    *,
    replicas: int,
    shares: Mapping[str, int],
    backend_bytes_per_s: float | None = None,
    lost: frozenset[str] = frozenset(),
    done: Sequence[NodeReport] = (),
    copies: Mapping[str, npt.NDArray[np.uint8]] | None = None,
    earlier: Sequence[GroupPlan] = (),
    reserved: Mapping[str, int] | None = None,
    cache: PlanCache[FlushPlan] | None = None,
    merged: Merged | None = None,
) -> GroupPlan:
    """Plan one round of a group.

    ``reports`` are what all nodes hashed, lost ones included; chunks in segments are stored (of a
    lost node only those in older segments), and those in *own* segments went through in waves and
    are in no memory any more. ``nodes`` are the links of the nodes; of nodes with members and
    helpers alike, ``lost`` ones left out or not. ``shares`` are the replica bytes admitted per
    node, ``reserved`` what :func:`groupio.plan.copies.replica_shares` was given for them (default:
    the logical bytes of each node's members).

    In later rounds ``done`` are reports of what is durable by now (rows in segments), ``copies``
    digests (uint8[m, 32]) of chunks that nodes hold besides their own, and ``earlier`` the plans
    whose orders live nodes still carry out; none of that is planned again.

    Raises IntegrityError when chunks are lost (see :func:`missing_chunks`), InvalidInput for a
    live node without a link, one named twice, and whatever :func:`plan_flush` refuses.
    """
    merged = merged or merge(reports)
    links = _live_links(reports, nodes, lost)
    under_way = [plan.orders for plan in earlier]
    holding = find_holding(reports, merged, links, lost, done, copies or {}, under_way)
    _refuse_missing(_missing(reports, merged, holding, lost))
    placed = plan_copies(
        merged.lengths,
        holding.holder_set,
        holding.holder_sets,
        links,
        replicas=replicas,
        reserved=_reserved(reports, links, reserved),
        room=np.array([shares.get(link.node, 0) for link in links], np.int64) - holding.kept_bytes,
    )
    number, holders = _with_copies(holding, placed)
    classes, unit = bundle(
        merged.lengths, number[placed.row], holders, ~holding.stored & ~holding.under_way
    )
    flush, reused = _flush(classes, links, backend_bytes_per_s, placed, cache, reports)
    sources, writers = assign_flush(classes, flush)
    if unit is not None:
        # Behind the last unit stands the answer for chunks that have none.
        sources, writers = (np.append(one, np.int32(-1))[unit] for one in (sources, writers))
    transfers = Transfers(merged, holding, placed, sources, writers)
    # One copy of the record would outlive no node that the one copy of the bytes does not.
    keepers = record_keepers(links, replicas) if replicas > 1 else ()
    orders, loads = give_orders(transfers, links, keepers)
    short = int(merged.lengths[placed.short].sum())
    return GroupPlan(
        orders=orders,
        makespan_s=loads.seconds(links, backend_bytes_per_s),
        moved_bytes=loads.moved_bytes,
        replica_bytes=loads.replica_bytes,
        short_bytes=short,
        notes=_notes(links, placed, short, replicas),
        reused=reused,
        room=_room(links, shares, placed),
    )


def missing_chunks(
    reports: Sequence[NodeReport],
    lost: frozenset[str],
    done: Sequence[NodeReport] = (),
    copies: Mapping[str, npt.NDArray[np.uint8]] | None = None,
    merged: Merged | None = None,
) -> Missing:
    """The chunks that neither a live node's memory nor a segment has; as in :func:`plan_group`."""
    merged = merged or merge(reports)
    names = dict.fromkeys([*(report.node for report in reports), *(copies or {})])
    links = [NodeLink(name, 1.0, 1.0, name) for name in names if name not in lost]
    holding = find_holding(reports, merged, links, lost, done, copies or {}, ())
    return _missing(reports, merged, holding, lost)


def _missing(
    reports: Sequence[NodeReport], merged: Merged, holding: Holding, lost: frozenset[str]
) -> Missing:
    homeless = np.array([not holders for holders in holding.holder_sets], np.bool_)
    if not homeless.any():
        return Missing(0, 0, ())
    gone = homeless[holding.holder_set] & ~holding.stored
    names = sorted(
        report.node
        for report, rows in zip(reports, merged.rows, strict=True)
        if report.node in lost and gone[rows].any()
    )
    return Missing(int(np.count_nonzero(gone)), int(merged.lengths[gone].sum()), tuple(names))


def _refuse_missing(gone: Missing) -> None:
    if gone.chunks:
        raise IntegrityError(
            f"{gone.chunks} chunks of {gone.bytes} bytes were only in the memory of the lost nodes"
            f" {', '.join(gone.nodes)}; save the epoch again",
            retry=Retry.WHOLE,
        )


def _live_links(
    reports: Sequence[NodeReport], nodes: Sequence[NodeLink], lost: frozenset[str]
) -> list[NodeLink]:
    links = [link for link in nodes if link.node not in lost]
    names = {link.node for link in links}
    if len(names) < len(links):
        raise InvalidInput(
            f"a node is named twice among {[link.node for link in links]}; give one of them"
            " another name"
        )
    unknown = [r.node for r in reports if r.node not in names and r.node not in lost]
    if unknown:
        raise InvalidInput(f"nodes {unknown} report chunks, but their links are not known")
    return links


def _reserved(
    reports: Sequence[NodeReport], links: Sequence[NodeLink], reserved: Mapping[str, int] | None
) -> npt.NDArray[np.int64]:
    if reserved is None:
        reserved = {
            report.node: sum(member.bytes_logical for member in report.members)
            for report in reports
        }
    return np.array([reserved.get(link.node, 0) for link in links], np.int64)


def _with_copies(
    holding: Holding, placed: Copies
) -> tuple[npt.NDArray[np.int32], list[tuple[int, ...]]]:
    """Who holds the chunks of each row once the copies are made: numbers int32[rows] of sets."""
    numbers: dict[tuple[int, ...], int] = {}
    of_row = [
        numbers.setdefault(
            tuple(sorted((*holding.holder_sets[s], *targets)))
            if targets
            else holding.holder_sets[s],
            len(numbers),
        )
        for s, targets in zip(placed.holder_set.tolist(), placed.targets, strict=True)
    ]
    return np.array(of_row, np.int32), list(numbers)


def _flush(
    classes: WriteClasses,
    links: Sequence[NodeLink],
    backend_bytes_per_s: float | None,
    placed: Copies,
    cache: PlanCache[FlushPlan] | None,
    reports: Sequence[NodeReport],
) -> tuple[FlushPlan, bool]:
    """The split of the classes over the links, from the cache where it fits exactly."""
    if cache is None:
        return _best_flush(classes, links, backend_bytes_per_s, placed), False
    group = fingerprint(
        {member.rank: member.items_id for report in reports for member in report.members},
        {report.node: [member.rank for member in report.members] for report in reports},
        [link.node for link in links],
        links,
    )
    found = structure(classes, backend_bytes_per_s, (placed.sent, placed.received))
    flush = cache.get(group, found)
    if flush is not None:
        return flush, True
    flush = _best_flush(classes, links, backend_bytes_per_s, placed)
    cache.put(group, found, flush)
    return flush, False


def _best_flush(
    classes: WriteClasses,
    links: Sequence[NodeLink],
    backend_bytes_per_s: float | None,
    placed: Copies,
) -> FlushPlan:
    """The flush plan; one without moves where those would only wait behind the copies."""
    flush = plan_flush(classes, links, backend_bytes_per_s=backend_bytes_per_s)
    rates = np.array([ln.fabric_bytes_per_s if ln.fabric_ok else np.inf for ln in links])
    copying = np.max(np.maximum(placed.sent, placed.received) / rates, initial=0.0)
    egress, ingress = placed.sent + flush.egress_bytes, placed.received + flush.ingress_bytes
    all_moves = np.max(np.maximum(egress, ingress) / rates, initial=0.0)
    if not flush.egress_bytes.any() or all_moves <= max(flush.makespan_s, copying):
        return flush
    resting = [msgspec.structs.replace(link, fabric_ok=False) for link in links]
    still = plan_flush(classes, resting, backend_bytes_per_s=backend_bytes_per_s)
    return still if max(still.makespan_s, copying) <= all_moves else flush


def structure(
    classes: WriteClasses,
    backend_bytes_per_s: float | None = None,
    crossing: Sequence[npt.NDArray[np.int64]] = (),
) -> bytes:
    """BLAKE3 over all that a flush plan depends on besides the links.

    The classes come from this epoch's digests: a chunk that lost a duplicate, or one that is
    stored by now, changes the count of a class. ``crossing`` are the bytes of copies on the fabric
    ports. Equal structure, equal plan.
    """
    hasher = blake3(b"groupio structure 2")
    numbers: dict[tuple[int, ...], int] = {}
    sets = [numbers.setdefault(holders, len(numbers)) for holders in classes.holders]
    columns = [np.array(sets, np.int64), classes.lengths, classes.counts, *crossing]
    hasher.update(repr((backend_bytes_per_s, list(numbers), [len(c) for c in columns])).encode())
    for column in columns:
        hasher.update(np.ascontiguousarray(column, np.int64).tobytes())
    return hasher.digest()


def _room(links: Sequence[NodeLink], shares: Mapping[str, int], placed: Copies) -> dict[str, int]:
    """The replica bytes that nodes would need in all, where they lack some."""
    return {
        link.node: shares.get(link.node, 0) + int(more)
        for link, more in zip(links, placed.lacking.tolist(), strict=True)
        if more
    }


def _notes(links: Sequence[NodeLink], placed: Copies, short: int, replicas: int) -> tuple[str, ...]:
    notes = []
    resting = [link.node for link in links if not link.fabric_ok]
    if resting:
        notes.append(
            f"the fabric of {', '.join(resting)} is not used; what they hold goes over the storage"
            " network alone"
        )
    if short:
        notes.append(
            f"{np.count_nonzero(placed.short)} chunks of {short} bytes are in fewer than {replicas}"
            " failure domains, and no other node can take them"
        )
    return tuple(notes)
