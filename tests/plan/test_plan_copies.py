"""Copies reach k failure domains, and always fit into what was reserved before."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from groupio.errors import InvalidInput
from groupio.model import CHUNK_BYTES, NodeLink
from groupio.plan import copies as copies_module
from groupio.plan.copies import (
    Copies,
    domains_of,
    partners,
    plan_copies,
    record_keepers,
    replica_shares,
)
from groupio.plan.merge import find_holders


class World:
    """Chunks held by nodes; ``held`` is bool[nodes, n]."""

    def __init__(self, held: np.ndarray, lengths: np.ndarray, nodes: list[NodeLink]) -> None:
        self.held, self.lengths, self.nodes = held, lengths.astype(np.int64), nodes
        rows = [np.flatnonzero(mine) for mine in held]
        self.holder_set, self.holder_sets = find_holders(rows, held.shape[1])
        self.bytes = {
            link.node: int(self.lengths[mine].sum()) for link, mine in zip(nodes, held, strict=True)
        }

    def plan(
        self, replicas: int, room: list[int], reserved: dict[str, int] | None = None
    ) -> Copies:
        """The plan, of which everything that must hold always is checked."""
        reserved = self.bytes if reserved is None else reserved
        plan = plan_copies(
            self.lengths,
            self.holder_set,
            self.holder_sets,
            self.nodes,
            replicas=replicas,
            reserved=np.array([reserved.get(link.node, 0) for link in self.nodes], np.int64),
            room=np.array(room, np.int64),
        )
        got, sent = np.zeros((2, len(self.nodes)), np.int64)
        domains = [link.domain for link in self.nodes]
        for c, row in enumerate(plan.row.tolist()):
            assert plan.holder_set[row] == self.holder_set[c]
            holders = set(np.flatnonzero(self.held[:, c]).tolist())
            targets = plan.targets[row]
            where = [domains[t] for t in targets]
            assert len(set(where)) == len(where)
            assert not {domains[h] for h in holders} & set(where)
            if targets:
                assert int(plan.sources[row]) in holders
                assert self.nodes[plan.sources[row]].fabric_ok
                assert all(self.nodes[t].fabric_ok for t in targets)
                got[list(targets)] += self.lengths[c]
                sent[plan.sources[row]] += self.lengths[c] * len(targets)
            reached = len({domains[h] for h in holders} | set(where))
            assert plan.short[c] == (replicas > 1 and reached < replicas)
            if replicas > 1 and targets:
                assert reached <= replicas
        assert (got <= np.array(room)).all()
        assert (plan.sent.tolist(), plan.received.tolist()) == (sent.tolist(), got.tolist())
        self.got = got.tolist()
        return plan


def links(domains: str, rate: float = 1e9) -> list[NodeLink]:
    return [NodeLink(f"n{i}", 1e9, rate, domain) for i, domain in enumerate(domains)]


@given(
    seed=st.integers(0, 1 << 20),
    domains=st.lists(st.sampled_from("abcdef"), min_size=1, max_size=9),
    replicas=st.integers(1, 4),
    chunks=st.integers(0, 60),
    repeats=st.sampled_from([0.0, 0.2, 0.6]),
    idle=st.booleans(),
)
@settings(deadline=None, max_examples=150)
def test_what_is_reserved_before_always_suffices(
    seed: int, domains: list[str], replicas: int, chunks: int, repeats: float, idle: bool
) -> None:
    rng = np.random.default_rng(seed)
    nodes = [
        NodeLink(f"n{i}", 1e9, float(rng.choice([1e9, 3e9])), domain)
        for i, domain in enumerate(domains)
    ]
    held = rng.random((len(nodes), chunks)) < repeats
    # Often one node has most; sometimes half of the nodes are helpers that have nothing.
    weights = rng.random(len(nodes)) ** 4
    weights[len(nodes) // 2 + 1 :] *= not idle
    owner = rng.choice(len(nodes), chunks, p=weights / weights.sum())
    held[owner, np.arange(chunks)] = True
    lengths = rng.choice([1, 5000, CHUNK_BYTES - 1, CHUNK_BYTES], chunks)
    # Many chunks in each place, so that parts are large enough to be divided.
    world = World(np.repeat(held, 5, axis=1), np.repeat(lengths, 5), nodes)
    reserved = {node: nbytes + int(rng.integers(3)) * 4096 for node, nbytes in world.bytes.items()}
    # Until the contents are known, links have been measured anew and nodes came in another order.
    before = [replace(nodes[i], fabric_bytes_per_s=2e9) for i in rng.permutation(len(nodes))]
    shares = replica_shares(reserved, before, replicas)
    plan = world.plan(replicas, [shares[link.node] for link in nodes], reserved)
    assert bool(plan.short.any()) == (
        replicas > 1 and len(world.lengths) > 0 and len(domains_of(nodes)) < replicas
    )


@given(
    seed=st.integers(0, 1 << 20),
    replicas=st.integers(2, 3),
    scale=st.sampled_from([0.0, 0.3, 0.9, 5.0]),
)
@settings(deadline=None, max_examples=100)
def test_room_is_never_exceeded_whatever_it_is(seed: int, replicas: int, scale: float) -> None:
    rng = np.random.default_rng(seed)
    nodes = [
        NodeLink(f"n{i}", 1e9, 1e9, str(rng.choice(list("abcd"))), bool(rng.random() < 0.8))
        for i in range(6)
    ]
    held = rng.random((6, 80)) < 0.25
    lengths = rng.integers(1, CHUNK_BYTES + 1, 80)
    world = World(held, lengths, nodes)
    room = (rng.random(6) * scale * 20 * CHUNK_BYTES).astype(np.int64).tolist()
    # Not all holders had anything reserved: some have copies of an earlier round only.
    world.plan(replicas, room, {node: n for node, n in world.bytes.items() if rng.random() < 0.7})


def test_a_ring_without_any_divisibility() -> None:
    """Five nodes, two copies: everybody keeps what the node before has, and nothing else moves."""
    world = World(np.repeat(np.eye(5, dtype=bool), 10, axis=1), np.full(50, 100), links("abcde"))
    shares = replica_shares(world.bytes, world.nodes, 2)
    assert shares == {f"n{i}": 1000 for i in range(5)}
    plan = world.plan(2, list(shares.values()))
    assert world.got == [1000] * 5
    assert {(int(s), t) for s, t in zip(plan.sources, plan.targets, strict=True) if t} == {
        (i, ((i + 1) % 5,)) for i in range(5)
    }


def test_duplicates_in_other_domains_are_copies() -> None:
    held = np.ones((4, 8), bool)
    world = World(held, np.full(8, 100), links("aabb"))
    assert not world.plan(2, [0] * 4).short.any()
    # Three copies: two domains have it, the third one has to get it; any holder may send.
    wide = World(np.vstack((held, held[:1] & False)), np.full(8, 100), links("aabbc"))
    plan = wide.plan(3, [800] * 5)
    assert wide.got == [0, 0, 0, 0, 800]
    assert len({int(source) for source in plan.sources if source >= 0}) == 4


def test_one_node_that_has_all_spreads_its_copies() -> None:
    nodes = links("abcdefgh")
    held = np.zeros((8, 400), bool)
    held[0] = True
    world = World(held, np.full(400, CHUNK_BYTES), nodes)
    shares = replica_shares(world.bytes, nodes, 2)
    assert shares["n0"] == 0
    assert max(shares.values()) < 1.1 * 400 * CHUNK_BYTES / 7
    world.plan(2, list(shares.values()))
    assert max(world.got) - min(world.got[1:]) <= 2 * CHUNK_BYTES


def test_divided_parts_have_room_for_whole_chunks() -> None:
    held = np.zeros((3, 33), bool)
    held[0] = True
    world = World(held, np.full(33, CHUNK_BYTES), links("abc"))
    shares = replica_shares(world.bytes, world.nodes, 2)
    assert shares == {"n0": 0, "n1": 17.5 * CHUNK_BYTES, "n2": 17.5 * CHUNK_BYTES}
    assert not world.plan(2, list(shares.values())).short.any()
    assert sorted(world.got) == [0, 16 * CHUNK_BYTES, 17 * CHUNK_BYTES]


def test_without_room_at_the_partner_another_node_is_found() -> None:
    held = np.zeros((3, 40), bool)
    held[0] = True
    world = World(held, np.full(40, 1000), links("abc"))
    assert replica_shares(world.bytes, world.nodes, 2) == {"n0": 0, "n1": 40_000, "n2": 0}
    plan = world.plan(2, [0, 9_500, 100_000])
    assert not plan.short.any()
    assert world.got == [0, 9_000, 31_000]
    plan = world.plan(2, [0, 9_500, 20_000])
    assert np.count_nonzero(plan.short) == 11


def test_the_search_for_room_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies_module, "PASSES_MAX", 1)
    held = np.zeros((3, 4), bool)
    held[0] = True
    world = World(held, np.full(4, 1000), links("abc"))
    # One pass gives each chunk one copy at most.
    assert world.plan(3, [0, 4000, 4000], {}).short.all()
    monkeypatch.setattr(copies_module, "PASSES_MAX", 2)
    assert not world.plan(3, [0, 4000, 4000], {}).short.any()


def test_a_fabric_that_is_not_used_neither_sends_nor_receives() -> None:
    nodes = [NodeLink("n0", 1e9, 0.0, "a", False), *links("xbc")[1:]]
    world = World(np.eye(3, dtype=bool), np.full(3, 10), nodes)
    assert replica_shares(world.bytes, nodes, 2) == {"n0": 0, "n1": 10, "n2": 10}
    assert world.plan(2, [10, 10, 10]).short.tolist() == [True, False, False]


def test_too_few_domains() -> None:
    nodes = links("aab")
    assert domains_of(nodes) == ("a", "b")
    assert record_keepers(nodes, 2) == ("n0", "n2")
    assert record_keepers(nodes, 5) == ("n0", "n2")
    assert record_keepers(nodes, 1) == ("n0",)
    world = World(np.eye(3, dtype=bool), np.full(3, 10), nodes)
    shares = replica_shares(world.bytes, nodes, 3)
    assert world.plan(3, list(shares.values())).short.all()
    assert sum(world.got) == 30  # one copy of each is better than none


def test_partners_are_in_other_domains_and_even() -> None:
    saved = np.full(6, 1 << 30)
    groups = partners(saved, links("aabbcc"), 3)
    for node, mine in enumerate(groups):
        assert len(mine) == 1
        assert sorted("aabbcc"[other] for other in mine[0]) == sorted(set("abc") - {"aabbcc"[node]})
    received = np.bincount([other for mine in groups for other in mine[0]])
    assert received.tolist() == [2] * 6


@pytest.mark.parametrize("rate", [0.0, -1.0, float("nan"), float("inf")])
def test_bad_input_is_refused(rate: float) -> None:
    world = World(np.eye(2, dtype=bool), np.full(2, 10), links("ab", rate))
    with pytest.raises(InvalidInput, match="n0 has a bandwidth"):
        world.plan(2, [10, 10])
    with pytest.raises(InvalidInput, match="n7"):
        replica_shares({"n7": 1}, links("ab"), 2)


@given(
    seed=st.integers(0, 1 << 20),
    domains=st.lists(st.sampled_from("abcdef"), min_size=2, max_size=8),
    replicas=st.integers(2, 4),
    chunks=st.integers(1, 150),
    scale=st.sampled_from([0.0, 0.3, 1.0]),
)
@settings(deadline=None, max_examples=150)
def test_with_the_room_that_is_lacking_nothing_stays_short(
    seed: int, domains: list[str], replicas: int, chunks: int, scale: float
) -> None:
    rng = np.random.default_rng(seed)
    nodes = links("".join(domains))
    held = rng.random((len(nodes), chunks)) < rng.choice([0.1, 0.5])
    held[rng.integers(0, len(nodes), chunks), np.arange(chunks)] = True
    world = World(held, rng.integers(1, CHUNK_BYTES + 1, chunks), nodes)
    room = (rng.random(len(nodes)) * scale * world.lengths.sum()).astype(np.int64)
    plan = world.plan(replicas, room.tolist())
    for _ in range(12):  # what one row of chunks takes may be what another one lacks
        if not plan.lacking.any():
            break
        room += plan.lacking
        plan = world.plan(replicas, room.tolist())
    assert bool(plan.short.any()) == (len(domains_of(nodes)) < replicas)
    assert not plan.lacking.any()


def test_after_a_loss_the_rest_says_what_room_it_lacks() -> None:
    nodes = links("ab")
    # Of three nodes the third is lost: chunk 0 was on it and a, 1 on it and b, 2 on both here.
    world = World(np.array([[1, 0, 1], [0, 1, 1]], bool), np.array([10, 20, 30]), nodes)
    plan = world.plan(2, [0, 4])
    assert plan.short.tolist() == [True, True, False]
    assert plan.lacking.tolist() == [20 + 20, 10 - 4 + 20]
    assert not world.plan(2, plan.lacking.tolist()).short.any()
