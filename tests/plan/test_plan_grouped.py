"""Orders of a group's nodes: carried out, every chunk is stored once and kept k times."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_help import digest, raw, report

from groupio.errors import IntegrityError, InvalidInput, Retry
from groupio.model import ChunkTable, DecisionKey, NodeLink, NodeReport, SegmentRef
from groupio.plan import bundles
from groupio.plan.cache import PlanCache
from groupio.plan.copies import replica_shares
from groupio.plan.dedup import build_manifest
from groupio.plan.grouped import GroupPlan, missing_chunks, plan_group, structure
from groupio.plan.write import WriteClasses

KEY = DecisionKey(1, 1, 1)


def links(count: int, **change: Any) -> list[NodeLink]:
    return [NodeLink(f"n{i}", 1e9, 2e9, f"d{i}", **change) for i in range(count)]


def logical(reports: Sequence[NodeReport]) -> dict[str, int]:
    return {r.node: sum(m.bytes_logical for m in r.members) for r in reports}


class Cluster:
    """What the nodes have while orders are carried out."""

    def __init__(self, reports: Sequence[NodeReport], nodes: Sequence[NodeLink]) -> None:
        self.reports = {r.node: r for r in reports}
        self.nodes = {link.node: link for link in nodes}
        self.own = {link.node: set[bytes]() for link in nodes}
        self.kept = {link.node: set[bytes]() for link in nodes}
        self.stored: dict[bytes, list[str]] = {}
        self.length: dict[bytes, int] = {}
        for r in reports:
            for d, n, s in zip(rows(r.chunks), r.chunks.lengths, r.chunks.segments, strict=True):
                self.length[d] = int(n)
                if s < 0 or not r.segments[s].own:
                    self.own[r.node].add(d)
                if s >= 0:
                    self.stored[d] = [r.segments[s].name]

    def has(self, node: str) -> set[bytes]:
        return self.own[node] | self.kept[node]

    def carry_out(self, plan: GroupPlan, only: Sequence[str] | None = None) -> None:
        """Do what the plan says, in two phases: all chunks to keep first."""
        uplink = dict.fromkeys(self.nodes, 0)
        egress, ingress = dict(uplink), dict(uplink)
        todo = [node for node in plan.orders if only is None or node in only]
        natural = {node: self.has(node) for node in self.nodes}
        will_keep: dict[str, set[bytes]] = {node: set() for node in self.nodes}
        for node in plan.orders:
            for fetch in plan.orders[node].fetch:
                will_keep[node] |= {d for d, k in zip(rows(fetch), fetch.keep, strict=True) if k}
        moved = copied = 0
        for node in todo:
            order = plan.orders[node]
            assert (np.diff(order.write) > 0).all()
            for row in order.write.tolist():
                d = self.reports[node].chunks.digests[row].tobytes()
                assert d in self.own[node]
                self.store(node, d)
                uplink[node] += self.length[d]
            for fetch in order.fetch:
                assert len(fetch.others) <= 8
                for d, n, keep, write in zip(
                    rows(fetch), fetch.lengths, fetch.keep, fetch.write, strict=True
                ):
                    assert keep or write
                    assert n == self.length[d]
                    assert d in natural[fetch.source] | will_keep[fetch.source]
                    assert all(d in natural[other] for other in fetch.others)
                    assert not {node, fetch.source} & set(fetch.others)
                    if fetch.source == node:
                        assert d in self.kept[node]
                        assert keep
                    else:
                        assert self.nodes[node].fabric_ok
                        assert self.nodes[fetch.source].fabric_ok
                        assert d not in natural[node]
                        egress[fetch.source] += int(n)
                        ingress[node] += int(n)
                        copied += int(n) if keep else 0
                        moved += 0 if keep else int(n)
                    if keep:
                        self.kept[node].add(d)
                    if write:
                        self.store(node, d)
                        uplink[node] += int(n)
        if only is None:
            assert (plan.moved_bytes, plan.replica_bytes) == (moved, copied)
            busy = [uplink[name] / link.uplink_bytes_per_s for name, link in self.nodes.items()]
            busy += [
                max(egress[name], ingress[name]) / link.fabric_bytes_per_s
                for name, link in self.nodes.items()
                if link.fabric_ok
            ]
            assert plan.makespan_s == pytest.approx(max(busy))

    def store(self, node: str, d: bytes) -> None:
        assert d not in self.stored, "stored twice"
        self.stored[d] = [node]

    def domains(self, d: bytes, lost: frozenset[str] = frozenset()) -> set[str]:
        return {
            link.domain
            for name, link in self.nodes.items()
            if name not in lost and d in self.has(name)
        }

    def done(self, node: str) -> NodeReport:
        """The NodeStored report: the own table, then what it wrote for others."""
        mine = self.reports.get(node)
        names = rows(mine.chunks) if mine else []
        names += [d for d, by in self.stored.items() if by == [node] and d not in names]
        n = len(names)
        places = [0 if self.stored.get(d) == [node] else -1 for d in names]
        table = ChunkTable(
            np.frombuffer(b"".join(names), np.uint8).reshape(n, 32),
            np.array([self.length[d] for d in names], np.int64),
            np.array(places, np.int32),
            np.arange(n, dtype=np.int64) * 8192,
        )
        segment = SegmentRef(f"{node}.seg", n * 8192, True)
        return NodeReport(node, (segment,), table, mine.members if mine else ())


def rows(table: Any) -> list[bytes]:
    return [row.tobytes() for row in table.digests]


def copies_of(cluster: Cluster, but: Sequence[str] = ()) -> dict[str, np.ndarray]:
    return {
        node: np.frombuffer(b"".join(sorted(kept)), np.uint8).reshape(-1, 32)
        for node, kept in cluster.kept.items()
        if kept and node not in but
    }


SIZES = [1, 40, 4096, 70_000]


def random_reports(rng: np.random.Generator, nodes: int, stored: bool = False) -> list[NodeReport]:
    """Members with some equal and some private chunks; a few contents are in older segments."""
    old = SegmentRef("old.seg", 1 << 20, False)
    made = []
    for node in range(nodes):
        saved = {}
        for rank in (2 * node, 2 * node + 1):
            n = int(rng.integers(0, 12))
            kinds = rng.integers(0, 3, n)
            names = [
                ("all", i) if kind == 0 else ("pair", node // 2, i) if kind == 1 else (rank, i)
                for i, kind in enumerate(kinds.tolist())
            ]
            items = [raw(f"i{i:02}", SIZES[i % 4]) for i in range(n)]
            saved[rank] = (items, names)
        older = {("all", i): (old, 4096 * i) for i in range(3)} if stored else {}
        made.append(report(f"n{node}", saved, stored=False, older=older))
    return made


@given(
    seed=st.integers(0, 1 << 20),
    nodes=st.integers(1, 5),
    helpers=st.integers(0, 2),
    replicas=st.integers(1, 3),
    stored=st.booleans(),
    few=st.booleans(),
)
@settings(deadline=None, max_examples=150)
def test_every_chunk_is_stored_once_and_kept_k_times(
    seed: int, nodes: int, helpers: int, replicas: int, stored: bool, few: bool
) -> None:
    rng = np.random.default_rng(seed)
    reports = random_reports(rng, nodes, stored)
    net = [
        NodeLink(f"n{i}", float(rng.choice([1e8, 1e9])), 1e9, f"d{i if not few else i // 2}")
        for i in range(nodes + helpers)
    ]
    order = rng.permutation(len(net))
    net = [net[i] for i in order]
    # Memory is reserved by whole pages, or by what the members say.
    reserved = {node: -(-nbytes // 4096) * 4096 for node, nbytes in logical(reports).items()}
    shares = replica_shares(reserved if few else logical(reports), net, replicas)
    plan = plan_group(
        reports, net, replicas=replicas, shares=shares, reserved=reserved if few else None
    )
    cluster = Cluster(reports, net)
    cluster.carry_out(plan)
    assert set(cluster.stored) == set(cluster.length)
    domains = {link.domain for link in net}
    for d in cluster.length:
        assert len(cluster.domains(d)) >= min(replicas, len(domains))
    assert (plan.short_bytes > 0) == (len(domains) < replicas and len(cluster.length) > 0)
    for node, kept in cluster.kept.items():
        assert sum(cluster.length[d] for d in kept) <= shares[node]
    keepers = min(replicas, len(domains)) if replicas > 1 else 0
    assert sum(order.record for order in plan.orders.values()) == keepers
    # The manifest finds every chunk in what the nodes then report.
    members = {r.node for r in reports}
    last = [cluster.done(link.node) for link in net if link.node in members]
    last += [cluster.done(link.node) for link in net if link.node not in members]
    if stored:
        last.append(replace(report("old", {}), segments=reports[0].segments))
    if not stored and len(cluster.length):
        made = manifest(last, 2 * nodes)
        assert len(made.chunks) == len(cluster.length)


def manifest(reports: Sequence[NodeReport], world: int) -> Any:
    return build_manifest(
        reports,
        store_id="5" * 32,
        job="job",
        key=KEY,
        incarnation=1,
        world_size=world,
        fingerprint=b"f" * 32,
        write_id="w",
        created_at=0.0,
    )


@given(seed=st.integers(0, 1 << 20), replicas=st.integers(1, 3), ran=st.integers(0, 4))
@settings(deadline=None, max_examples=100)
def test_after_a_loss_only_the_missing_fragments_move(seed: int, replicas: int, ran: int) -> None:
    """Some nodes did their part, others are still at it when one is lost."""
    rng = np.random.default_rng(seed)
    reports = random_reports(rng, 4)
    net = links(5)
    shares = {link.node: 1 << 30 for link in net}
    first = plan_group(reports, net, replicas=replicas, shares=shares)
    cluster = Cluster(reports, net)
    finished = [f"n{i}" for i in rng.permutation(5)[:ran]]
    cluster.carry_out(first, finished)
    lost = frozenset({f"n{rng.integers(5)}"})
    # What the lost node wrote is stored if it had told so.
    done = [cluster.done(node) for node in finished]
    copies = copies_of(cluster, but=sorted(lost))
    gone = missing_chunks(reports, lost, done, copies)
    only_there = [
        d for d in cluster.length if d not in cluster.stored and not cluster.domains(d, lost)
    ]
    assert gone[:2] == (len(only_there), sum(cluster.length[d] for d in only_there))
    assert gone.nodes == (tuple(lost) if only_there else ())
    again: Mapping[str, Any] = {
        "replicas": replicas,
        "shares": shares,
        "lost": lost,
        "done": done,
        "copies": copies,
    }
    if only_there:
        with pytest.raises(IntegrityError, match=f"lost nodes {min(lost)}") as caught:
            plan_group(reports, net, **again)
        assert caught.value.retry is Retry.WHOLE
        return
    before = dict(cluster.stored)
    second = plan_group(reports, net, **again, earlier=[first])
    assert set(second.orders) == set(cluster.nodes) - lost
    # The others finish the first round, as far as they can without the lost node.
    left = [node for node in first.orders if node not in finished and node not in lost]
    survivors = Cluster(reports, net)
    survivors.stored, survivors.kept = before, {**cluster.kept, **{node: set() for node in lost}}
    without = {node: without_source(first.orders[node], lost) for node in left}
    survivors.carry_out(replace(first, orders=without), left)
    survivors.carry_out(second, list(second.orders))
    assert set(survivors.stored) == set(cluster.length)
    if replicas <= 3:
        for d in cluster.length:
            if survivors.domains(d, lost):
                assert len(survivors.domains(d, lost)) >= replicas


def without_source(order: Any, lost: frozenset[str]) -> Any:
    """The order of a node that tries the others when the source is lost."""
    fetch = []
    for one in order.fetch:
        alive = [name for name in (one.source, *one.others) if name not in lost]
        if alive:
            others = tuple(alive[1:])
            fetch.append(replace(one, source=alive[0], others=others))
    return replace(order, fetch=tuple(fetch))


def one(node: str, rank: int, names: Any, stored: bool = False) -> NodeReport:
    items = [raw(f"i{i:03}", 1000) for i in range(len(names))]
    return report(node, {rank: (items, names)}, stored=stored)


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_group_without_bytes_has_a_plan(replicas: int) -> None:
    reports = [report(f"n{i}", {i: ([raw("nothing", 0)], [])}, stored=False) for i in range(3)]
    plan = plan_group(reports, links(3), replicas=replicas, shares={})
    assert plan.makespan_s == plan.moved_bytes == plan.replica_bytes == plan.short_bytes == 0
    assert not any(len(order.write) or order.fetch for order in plan.orders.values())


def test_idle_uplinks_write_what_one_node_has() -> None:
    reports = [one("n0", 0, [("x", i) for i in range(90)])]
    net = links(3)
    plan = plan_group(reports, net, replicas=1, shares={})
    Cluster(reports, net).carry_out(plan)
    assert plan.makespan_s == pytest.approx(30_000 / 1e9)
    assert plan.moved_bytes == 60_000
    # With copies the keepers write: nothing moves only to be written.
    shares = replica_shares(logical(reports), net, 2)
    kept = plan_group(reports, net, replicas=2, shares=shares)
    Cluster(reports, net).carry_out(kept)
    assert kept.replica_bytes == 90_000
    assert all(
        fetch.keep.any() or not fetch.write.all()
        for order in kept.orders.values()
        for fetch in order.fetch
        if fetch.source == "n0" and order is kept.orders["n1"]
    )


def test_moves_do_not_queue_behind_copies() -> None:
    """n0 has little time on its uplink: with a fast fabric others write for it."""
    reports = [one("n0", 0, [("x", i) for i in range(90)]), one("n1", 1, [("y", 0)])]

    def planned(fabric: float) -> GroupPlan:
        net = [NodeLink(f"n{i}", 1e9 if i else 1e8, fabric, f"d{i}") for i in range(4)]
        shares = {"n0": 0, "n1": 90_000, "n2": 1000, "n3": 0}
        plan = plan_group(reports, net, replicas=2, shares=shares)
        Cluster(reports, net).carry_out(plan)
        assert (plan.replica_bytes, plan.short_bytes) == (91_000, 0)
        return plan

    assert planned(1e10).moved_bytes > 50_000
    assert planned(1e9).moved_bytes == 0
    # In between they are worth it although the ports are busy.
    between = planned(2.2e9)
    assert between.moved_bytes > 0
    assert between.makespan_s > 90_000 / 2.2e9


def test_the_backend_bounds_the_flush() -> None:
    reports = [one("n0", 0, "abcd")]
    plan = plan_group(reports, links(1), replicas=1, shares={}, backend_bytes_per_s=1e6)
    assert plan.makespan_s == pytest.approx(4e-3)


def test_a_fabric_that_rests_is_noted() -> None:
    reports = [one("n0", 0, "abcd"), one("n1", 1, "e")]
    net = links(2, fabric_ok=False)
    plan = plan_group(reports, net, replicas=2, shares={"n0": 9999, "n1": 9999})
    Cluster(reports, net).carry_out(plan)
    assert plan.replica_bytes == plan.moved_bytes == 0
    assert plan.short_bytes == 5000
    assert "n0, n1 is not used" in plan.notes[0]
    assert "5 chunks of 5000 bytes are in fewer than 2" in plan.notes[1]


def test_waves_are_stored_and_gone() -> None:
    """What was written while the memory was reused is not sent, nor written again."""
    reports = [one("n0", 0, "abcd", stored=True), one("n1", 1, "abxy")]
    net = links(3)
    shares = {link.node: 1 << 20 for link in net}
    plan = plan_group(reports, net, replicas=2, shares=shares)
    cluster = Cluster(reports, net)
    cluster.carry_out(plan)
    # a and b are in the memory of n1 too, c and d are only in the store.
    assert plan.short_bytes == 2000
    assert not len(plan.orders["n0"].write)
    # Of a lost node, what it wrote does not count before it has said that it is durable.
    assert missing_chunks(reports, frozenset({"n0"})) == (2, 2000, ("n0",))
    assert missing_chunks(reports, frozenset({"n0"}), done=[reports[0]]) == (0, 0, ())


def test_a_table_that_names_a_chunk_twice_has_it_written_once() -> None:
    base = one("n0", 0, "ab")
    twice = np.array([0, 1, 1, 0])
    table = ChunkTable(
        base.chunks.digests[twice],
        base.chunks.lengths[twice],
        base.chunks.segments[twice],
        base.chunks.offsets[twice],
    )
    plan = plan_group([replace(base, chunks=table)], links(1), replicas=1, shares={})
    assert plan.orders["n0"].write.tolist() == [0, 1]


def test_a_replica_is_written_by_who_kept_it() -> None:
    """A later round: the writer has the chunk already, as a copy."""
    reports = [one("n0", 0, "ab"), one("n1", 1, "c")]
    net = links(3)
    copies = {
        "n2": np.frombuffer(digest("a") + digest("b") + digest("unknown"), np.uint8).reshape(3, 32),
        "gone": np.zeros((1, 32), np.uint8),
        "n1": np.empty((0, 32), np.uint8),
    }
    plan = plan_group(reports, net, replicas=2, shares={}, lost=frozenset({"n0"}), copies=copies)
    cluster = Cluster(reports, net)
    cluster.kept["n2"] = {digest("a"), digest("b")}
    cluster.own["n0"] = set()
    cluster.carry_out(plan)
    (fetch,) = plan.orders["n2"].fetch
    assert (fetch.source, fetch.others) == ("n2", ())
    # Nothing is left of the shares for what only one domain has now.
    assert plan.short_bytes == 3000


def test_many_lengths_are_bundled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bundles.bundle, "__defaults__", (4,))
    rng = np.random.default_rng(3)
    items = [raw(f"i{i:04}", int(n)) for i, n in enumerate(rng.integers(1, 900, 600))]
    reports = [
        report("n0", {0: (items, [("x", i) for i in range(600)])}, stored=False),
        report("n1", {1: (items[:300], [("x", i) for i in range(300)])}, stored=False),
    ]
    net = links(2)
    plan = plan_group(reports, net, replicas=1, shares={})
    cluster = Cluster(reports, net)
    cluster.carry_out(plan)
    assert set(cluster.stored) == set(cluster.length)
    best = sum(cluster.length.values()) / 2e9
    assert plan.makespan_s <= 1.05 * best


def test_the_cache_needs_the_same_group_and_the_same_duplicates() -> None:
    net = links(2)
    cache: PlanCache[Any] = PlanCache(2)

    def planned(first: str, second: str, nodes: Sequence[NodeLink] = net, **rest: Any) -> bool:
        reports = [one("n0", 0, first), one("n1", 1, second)]
        plan = plan_group(reports, nodes, replicas=1, shares={}, cache=cache, **rest)
        cluster = Cluster(reports, nodes)
        cluster.carry_out(plan, list(plan.orders))
        assert set(cluster.stored) == set(cluster.length)
        return plan.reused

    assert not planned("abc", "abd")
    assert planned("xyz", "xyw")
    assert planned("xyz", "wyx")
    # A replica less is another structure; other links are another group.
    assert not planned("abc", "aed")
    assert cache.refused == 1
    assert not planned("abc", "aed", links(2, fabric_ok=False))
    assert not planned("abc", "aed", backend_bytes_per_s=1e9)
    assert planned("abc", "dea", backend_bytes_per_s=1e9)


def test_structure_sees_all_that_a_flush_depends_on() -> None:
    def classes(*rows: tuple[tuple[int, ...], int, int]) -> WriteClasses:
        return WriteClasses(
            tuple(row[0] for row in rows),
            np.array([row[1] for row in rows], np.int64),
            np.array([row[2] for row in rows], np.int64),
            np.empty(0, np.int32),
        )

    made = [
        structure(classes()),
        structure(classes(((0,), 5, 1))),
        structure(classes(((1,), 5, 1))),
        structure(classes(((0,), 6, 1))),
        structure(classes(((0,), 5, 2))),
        structure(classes(((0,), 5, 1)), 1e9),
        structure(classes(((0,), 5, 1), ((1,), 5, 1))),
        structure(classes(((0, 1), 5, 1))),
        structure(classes(((0, 1), 5, 1)), None, [np.array([1, 0]), np.array([0, 1])]),
        structure(classes(((0, 1), 5, 1)), None, [np.array([0, 1]), np.array([1, 0])]),
    ]
    assert len(set(made)) == len(made)


def test_bad_input_is_refused() -> None:
    reports = [one("n0", 0, "ab")]
    with pytest.raises(InvalidInput, match=r"nodes \['n0'\] report chunks"):
        plan_group(reports, links(3)[1:], replicas=1, shares={})
    with pytest.raises(InvalidInput, match="named twice"):
        plan_group(reports, [*links(1), *links(1)], replicas=1, shares={})


def test_a_group_without_bytes() -> None:
    plan = plan_group([one("n0", 0, "")], links(2), replicas=2, shares={})
    assert plan.makespan_s == 0
    assert not any(order.fetch or len(order.write) for order in plan.orders.values())
