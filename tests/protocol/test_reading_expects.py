"""What a node's reader expects to have, and memory that the agent keeps for reads."""

from __future__ import annotations

import numpy as np

from groupio.protocol import effects as fx
from groupio.protocol import events as ev
from groupio.protocol import reading_messages as rm
from groupio.protocol.agent import AgentMachine
from groupio.protocol.ledger import EXTENT_ALIGN, Ledger
from groupio.protocol.reading import NodeReader

MIB = 1 << 20


def test_peers_may_wait_for_what_is_here_or_wanted_or_not_known_to_be_lost() -> None:
    reader = NodeReader("k", "a", np.full(3, 100))
    assert reader.expects(0)  # orders of others may be sooner than this node's
    reader.handle(rm.ChunksHere(np.array([1], np.int32)))
    reader.handle(rm.SwarmLost())
    assert not reader.expects(0)
    assert reader.expects(1)
    rows, zero = np.array([2], np.int32), np.zeros(1, np.int64)
    reader.handle(rm.ClientWants("c", 1, rows, zero, zero + 100))
    assert reader.expects(2)
    reader.handle(rm.SwarmBack())
    reader.handle(rm.ChunksLost((1,)))
    assert not reader.expects(1)


def test_memory_for_reads_counts_and_takes_free_memory() -> None:
    machine = AgentMachine("n", Ledger(8 * EXTENT_ALIGN))
    machine.handle(ev.SaveExpected("c", 6 * EXTENT_ALIGN))
    assert machine.ledger.total() == 6 * EXTENT_ALIGN
    effects = machine.handle(ev.MemoryReserved(4 * EXTENT_ALIGN))
    assert [type(effect) for effect in effects] == [fx.Punch]
    assert machine.ledger.total() == 0
    assert machine.ledger.available == 4 * EXTENT_ALIGN
    assert machine.handle(ev.SaveExpected("c", 6 * EXTENT_ALIGN)) == []
    assert machine.handle(ev.MemoryReserved(-4 * EXTENT_ALIGN)) == []
    assert machine.ledger.available == 8 * EXTENT_ALIGN
