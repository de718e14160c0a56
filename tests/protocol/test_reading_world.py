"""Whole grouped reads of several nodes, in random order, without and with failures."""

from __future__ import annotations

import random

import pytest
from reading_world import ReadingWorld

SMALL = {"store_bytes": 30, "peer_bytes": 20, "peers_bytes": 40}


def new_world(nodes: int, chunks: int = 24, seed: int = 0, **limits: int) -> ReadingWorld:
    world = ReadingWorld([10] * chunks, seed)
    for number in range(nodes):
        world.add(f"n{number}", **(limits or SMALL))
    return world


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("nodes", [1, 2, 5, 9])
def test_a_grouped_load_reads_each_chunk_once(nodes: int, seed: int) -> None:
    world = new_world(nodes, seed=seed)
    for number in range(nodes):
        world.want(f"n{number}", "a", load="all", members=nodes)
    world.run()
    world.check_done()
    world.check_once()
    assert len(world.reads) == 24
    assert {name for name, _ in world.reads} == {f"n{number}" for number in range(nodes)}


@pytest.mark.parametrize("seed", range(3))
def test_copies_in_memory_come_before_the_store(seed: int) -> None:
    world = new_world(6, seed=seed)
    world.keep("n0", list(range(20)))
    world.keep("n1", list(range(10, 24)))
    for number in range(6):
        world.want(f"n{number}", "a", load="all", members=6)
    world.run()
    world.check_done()
    assert not world.reads


@pytest.mark.parametrize("seed", range(8))
def test_who_comes_late_gets_it_from_those_before(seed: int) -> None:
    world = new_world(5, seed=seed)
    for number in range(5):
        world.want(f"n{number}", "a")
        for _ in range(world.random.randrange(60)):
            world.step()
    world.run()
    world.check_done()
    world.check_once()


def test_a_late_asker_takes_over_reading_that_has_not_begun() -> None:
    world = new_world(2, chunks=40)
    world.want("n0", "a")
    for _ in range(6):
        world.step()
    world.want("n1", "a")
    world.run()
    world.check_done()
    world.check_once()
    assert sum(name == "n1" for name, _ in world.reads) >= 10


@pytest.mark.parametrize("seed", range(8))
def test_clients_of_one_node_share_and_parts_stay_parts(seed: int) -> None:
    world = new_world(4, seed=seed)
    choose = random.Random(seed)
    for number in range(4):
        for client in "abc":
            spans = {}
            for row in range(24):
                start = choose.randrange(10)
                spans[row] = (start, choose.randrange(start, 10) + 1)
            world.want(f"n{number}", client, spans)
            for _ in range(choose.randrange(10)):
                world.step()
    world.run()
    world.check_done()
    world.check_once()


@pytest.mark.parametrize("seed", range(6))
def test_a_small_memory_holds_no_more_than_its_limit(seed: int) -> None:
    world = new_world(5, seed=seed, **SMALL, hold_bytes=40)
    for number in range(5):
        world.want(f"n{number}", "a", load="all", members=5)
    most = 0
    for _ in range(30):
        while world.step():
            most = max(most, *(host.reader.held_bytes for host in world.hosts.values()))
        world.fire_timers()
    world.check_done()
    assert most <= 60  # what peers are being sent may come on top


@pytest.mark.parametrize("seed", range(14))
def test_nodes_may_die_at_any_step(seed: int) -> None:
    world = new_world(6, seed=seed)
    for number in range(6):
        world.want(f"n{number}", "a", load="all", members=6)
    for name in world.random.sample(sorted(world.hosts), 3):
        for _ in range(world.random.randrange(250)):
            world.step()
        world.kill(name)
    world.run()
    world.check_done()


@pytest.mark.parametrize("seed", range(8))
def test_a_lying_peer_is_named_and_its_bytes_taken_elsewhere(seed: int) -> None:
    world = new_world(6, seed=seed)
    world.hosts["n2"].lies = True
    for number in range(6):
        world.want(f"n{number}", "a", load="all", members=6)
    world.run()
    world.check_done()
    assert {lie.peer for lie in world.lies} == {"n2"}


@pytest.mark.parametrize("seed", range(8))
def test_cut_links_are_gone_around(seed: int) -> None:
    world = new_world(6, seed=seed)
    for host in world.hosts.values():
        host.deaf = set(world.random.sample(sorted(world.hosts), 2)) - {host.name}
    for number in range(6):
        world.want(f"n{number}", "a", load="all" if number < 4 else "", members=4)
    world.run()
    world.check_done()


@pytest.mark.parametrize("seed", range(8))
def test_a_node_that_cannot_read_gets_it_from_another(seed: int) -> None:
    world = new_world(5, seed=seed)
    world.hosts["n1"].bad_rows = set(range(24))
    for number in range(5):
        world.want(f"n{number}", "a", load="all", members=5)
    world.run()
    world.check_done()


@pytest.mark.parametrize("seed", range(10))
def test_damage_in_the_store_is_told_to_all_who_want_the_chunk(seed: int) -> None:
    world = new_world(5, seed=seed)
    for host in world.hosts.values():
        host.bad_rows = {3, 17}
    clients = [world.want(f"n{n}", "a", load="all", members=5) for n in range(4)]
    clients.append(world.want("n4", "a"))
    for _ in range(world.random.randrange(100)):
        world.step()
    world.want("n4", "b", {3: (2, 5)}, load="all", members=5)
    world.run()
    world.check_done(damaged=True)
    assert all(client.damaged == {3: "storage", 17: "storage"} for client in clients)
    # Whoever had a good copy would have been asked.
    world.keep("n0", [3])
    world.run()
    world.want("n3", "c", {3: (0, 10)})
    world.run()
    assert not world.hosts["n3"].clients["c"].damaged


@pytest.mark.parametrize("seed", range(10))
def test_a_lost_controller_leaves_the_store_and_the_next_one_helps(seed: int) -> None:
    world = new_world(5, seed=seed)
    for number in range(5):
        world.want(f"n{number}", "a", load="all", members=5)
    for _ in range(world.random.randrange(300)):
        world.step()
    world.lose_swarm()
    for _ in range(world.random.randrange(60)):
        world.step()
    if seed % 2:
        world.new_swarm()
    world.run()
    world.check_done()


def test_without_a_controller_a_damaged_chunk_is_told() -> None:
    world = new_world(1)
    world.lose_swarm()
    world.hosts["n0"].bad_rows = {5}
    client = world.want("n0", "a")
    world.run()
    world.check_done(damaged=True)
    assert client.damaged == {5: "storage"}


@pytest.mark.parametrize("seed", range(10))
def test_memory_that_is_used_again_is_got_again(seed: int) -> None:
    world = new_world(4, seed=seed)
    for number in range(4):
        world.want(f"n{number}", "a", load="all", members=4)
    for _ in range(12):
        for _ in range(world.random.randrange(14)):
            world.step()
        world.hosts[world.random.choice(sorted(world.hosts))].forget()
    for number in range(4):
        world.want(f"n{number}", "b")
    world.run()
    world.check_done()


@pytest.mark.parametrize("seed", range(10))
def test_members_that_do_not_come_are_not_waited_for_for_ever(seed: int) -> None:
    world = new_world(3, seed=seed)
    for number in range(2):
        world.want(f"n{number}", "a", load="all", members=3)
    world.run()
    world.check_done()
    world.want("n2", "a", load="all", members=3)
    world.run()
    world.check_done()
    world.check_once()


@pytest.mark.parametrize("seed", range(14))
def test_everything_at_once(seed: int) -> None:
    world = ReadingWorld([random.Random(seed).randrange(1, 30) for _ in range(30)], seed, 1e9)
    choose = random.Random(seed)
    for number in range(6):
        world.add(f"n{number}", ok=choose.random() < 0.85, **SMALL, hold_bytes=200)
    world.hosts["n1"].lies = choose.random() < 0.3
    world.hosts["n2"].deaf = {"n3"}
    world.keep("n3", list(range(0, 30, 4)))
    for number in range(6):
        for client in "ab":
            spans = None
            if choose.random() < 0.4:
                spans = {row: (0, 1 + int(world.lengths[row]) // 2) for row in range(0, 30, 2)}
            world.want(f"n{number}", client, spans)
        for _ in range(choose.randrange(80)):
            world.step()
        if choose.random() < 0.5:
            world.hosts[choose.choice(sorted(world.hosts))].forget()
        if choose.random() < 0.2:
            world.kill(f"n{number}")
    if choose.random() < 0.3:
        world.lose_swarm()
        world.new_swarm()
    world.run()
    world.check_done()
