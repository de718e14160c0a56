"""The small parts of the protocol: messages, lines of epochs, memory, and what is remembered."""

from __future__ import annotations

import errno
import typing
from itertools import pairwise
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from protocol_help import opened

from groupio.errors import GroupAborted, GroupTimeout, LateMember, StorageError
from groupio.model import EPOCH_MAX, DecisionKey, Lineage
from groupio.protocol import effects as fx
from groupio.protocol import events as ev
from groupio.protocol import lineage as lines
from groupio.protocol import messages as msg
from groupio.protocol import reasons
from groupio.protocol.agent import AgentMachine
from groupio.protocol.controller import Controller
from groupio.protocol.group import Group, Phase
from groupio.protocol.ledger import EXTENT_ALIGN, Extent, Ledger, Use, extent_bytes
from groupio.protocol.lives import STALE_REMEMBERED
from groupio.protocol.missed import EPOCHS_REMEMBERED, Missed


@pytest.mark.parametrize("union", [msg.ToAgent, msg.ToRank], ids=["to agent", "to rank"])
def test_messages_survive_the_wire(union: Any) -> None:
    plain: dict[Any, Any] = {
        int: 7,
        str: "word",
        float: 1.5,
        bytes: b"\x00\xff",
        bool: True,
        DecisionKey: DecisionKey(1, 5, 2),
        tuple[str, ...]: ("a", "b"),
        tuple[int, ...]: (4, 5),
        tuple[bytes, ...]: (b"a",),
        dict[str, Any]: {"kind": "InvalidInput", "fields": {"ranks": [1, 2]}},
    }
    for kind in typing.get_args(union):
        hints = typing.get_type_hints(kind)
        values = {}
        for name in kind.__struct_fields__:
            options = typing.get_args(hints[name])
            optional = type(None) in options
            values[name] = plain[options[0] if optional else hints[name]]
        message = kind(**values)
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=union) == message


def test_an_unknown_event_is_a_defect_of_the_driver() -> None:
    machine = AgentMachine("n0", Ledger(EXTENT_ALIGN))
    with pytest.raises(AssertionError, match="agent machine got"):
        machine.handle(ev.Drain())
    with pytest.raises(AssertionError, match="group 3 got"):
        Group(3, 1, 1, 1, 1).handle(ev.Drain())


def test_a_copy_that_ends_after_the_group_was_given_up_changes_nothing() -> None:
    group = Group(1, 5, 1, 1, 1)
    group.join(opened(0, 1, 5))
    group.admit(DecisionKey(1, 5, 1), store=True)
    group.fail(GroupAborted("too late"))
    assert group.handle(ev.MemberCopied(1, 0, "n0")) == []
    assert group.phase is Phase.ABORTING


# -- lines of epochs ---------------------------------------------------------

KEYS = st.lists(
    st.builds(DecisionKey, st.integers(1, 6), st.integers(0, 12), st.integers(1, 3)), unique=True
)


@st.composite
def histories(draw: st.DrawFn) -> dict[int, Lineage]:
    """Lineages as rewinds make them: each starts after some epoch of an earlier one."""
    made = []
    for number in range(2, draw(st.integers(2, 7))):
        made.append(Lineage(number, draw(st.integers(1, number - 1)), draw(st.integers(-1, 12))))
    return lines.by_number(made)


@given(histories(), KEYS)
def test_a_line_shows_its_own_epochs_and_its_ancestors_up_to_each_rewind(
    lineages: dict[int, Lineage], keys: list[DecisionKey]
) -> None:
    for number in lineages:
        shown = lines.visible(keys, lineages, number)
        expected = set()
        for key in keys:
            at, limit = number, EPOCH_MAX
            while at != key.lineage and at != 1:
                limit = min(limit, lineages[at].after_epoch)
                at = lineages[at].parent
            if at == key.lineage and key.epoch <= limit:
                expected.add(key.epoch)
        assert set(shown) == expected
        assert all(key.epoch == epoch and key in keys for epoch, key in shown.items())


def test_a_rewind_cuts_all_older_lines() -> None:
    made = [Lineage(2, 1, 10), Lineage(3, 2, 5), Lineage(4, 3, 20)]
    table = lines.by_number(made)
    assert lines.current(table) == 4
    assert lines.reach(table, 4) == {4: EPOCH_MAX, 3: 20, 2: 5, 1: 5}


def test_damaged_lineages_do_not_hang_a_reader() -> None:
    ring = {1: Lineage(1, 2, 5), 2: Lineage(2, 1, 5)}
    assert lines.reach(ring, 2) == {2: EPOCH_MAX, 1: 5}
    assert lines.reach({}, 9) == {9: EPOCH_MAX}


# -- memory ---------------------------------------------------------

MANY = 40


@given(st.data())
def test_the_ledger_never_holds_more_than_the_budget(data: st.DataObject) -> None:
    ledger = Ledger(20 * EXTENT_ALIGN)
    held: list[Extent] = []
    for _ in range(data.draw(st.integers(0, MANY))):
        what = data.draw(st.sampled_from(["lease", "free", "quarantine", "drop"]))
        if what == "lease":
            length = data.draw(st.integers(0, 8 * EXTENT_ALIGN))
            spare = ledger.available - extent_bytes(length)
            if spare >= 0:
                extent = ledger.lease(data.draw(st.integers(1, 3)), length, spare)
                assert extent.use is Use.LEASED
                assert extent.length >= length
                assert all(out.use is Use.FREE for out in ledger.overcommit())
                held.append(extent)
        elif what == "drop":
            arena = data.draw(st.integers(1, 3))
            if not ledger.held(arena):
                ledger.drop_arena(arena)
        elif held:
            extent = held[data.draw(st.integers(0, len(held) - 1))]
            if what == "free":
                held.remove(extent)
                ledger.free(extent)
            else:
                ledger.quarantine(extent)
        assert ledger.total() <= ledger.budget
        assert ledger.total(Use.LEASED) + ledger.total(Use.QUARANTINED) == sum(
            e.length for e in held
        )
        spans = sorted((e.arena, e.offset, e.offset + e.length) for e in ledger.extents)
        for a, b in pairwise(spans):
            assert a[0] != b[0] or a[2] <= b[1]


def test_warm_memory_is_used_again_and_the_oldest_is_given_back_first() -> None:
    ledger = Ledger(8 * EXTENT_ALIGN)
    first, second = ledger.lease(1, 1), ledger.lease(1, 4 * EXTENT_ALIGN)
    ledger.free(second)
    ledger.free(first)
    assert ledger.lease(1, EXTENT_ALIGN) is first
    assert ledger.lease(1, 2 * EXTENT_ALIGN, spare=EXTENT_ALIGN) is not second, "too large"
    assert ledger.lease(1, 3 * EXTENT_ALIGN, spare=EXTENT_ALIGN) is second
    ledger.free(second)
    ledger.lease(2, 2 * EXTENT_ALIGN)
    assert ledger.overcommit() == [second]
    ledger.lease(2, 9 * EXTENT_ALIGN)
    with pytest.raises(AssertionError, match="more memory is leased"):
        ledger.overcommit()


# -- members that come too late ---------------------------------------------------------


def given_up(epoch: int) -> Group:
    group = Group(epoch, epoch, 1, 1, 3)
    group.join(opened(0, 3, epoch))
    group.fail(GroupTimeout("too long", missing=(1, 2), epoch=epoch))
    assert group.phase is Phase.DONE
    return group


def test_each_late_member_is_told_once() -> None:
    missed = Missed()
    missed.note(given_up(5))
    assert missed.tell(opened(0, 3, 5)) is None
    for rank in (1, 2):
        error = missed.tell(opened(rank, 3, 5))
        assert isinstance(error, LateMember)
        assert error.member == rank
        assert missed.tell(opened(rank, 3, 5)) is None
    assert missed.tell(opened(1, 3, 6)) is None


def test_only_the_newest_epochs_are_remembered() -> None:
    missed = Missed()
    for epoch in range(EPOCHS_REMEMBERED + 1):
        missed.note(given_up(epoch))
    assert missed.tell(opened(1, 3, 0)) is None
    assert missed.tell(opened(1, 3, 1)) is not None
    missed.forget(None)
    assert missed.tell(opened(2, 3, 1)) is None


def test_another_launch_missed_nothing_that_the_store_refused_to_this_one() -> None:
    for launch, told in ((None, True), ("next", False)):
        missed = Missed()
        missed.refused([opened(0, 3, 5)], StorageError("it is read-only"), {5: {1}})
        missed.forget(launch)
        assert missed.tell(opened(1, 3, 5)) is None
        assert (missed.tell(opened(2, 3, 5)) is not None) == told


def test_long_lists_of_ranks_are_cut() -> None:
    assert reasons.ranks(tuple(range(16))).endswith("14, 15")
    assert reasons.ranks(tuple(range(1000))).endswith("15 and 984 more")
    assert reasons.causes(GroupAborted("x", members=(3, 1))) == (3, 1)


def test_of_stale_saves_the_oldest_epochs_are_forgotten() -> None:
    controller = Controller()
    controller.handle(opened(0, 2, 99))
    commit = ev.CommittedEpoch(DecisionKey(1, 99, 1), 1, b"x")
    state = ev.StoreState("job", (), (commit,), (), 1)
    controller.handle(ev.StoreOpened(state))
    for epoch in range(STALE_REMEMBERED + 1):
        controller.handle(opened(1, 2, epoch, save_id=2 + epoch))
    origin = DecisionKey(1, 99, 1)

    def answers(epoch: int, save_id: int) -> bool:
        asked = opened(0, 2, epoch, save_id=save_id, begin_after=0, resumed_from=origin)
        return any(isinstance(e, fx.TellFailed) for e in controller.handle(asked))

    assert answers(1, 2)
    assert not answers(0, 3)


def test_a_path_without_its_store_is_an_error_that_says_what_to_do() -> None:
    gone = reasons.store_gone("/store")
    assert (gone.path, gone.errno) == ("/store", errno.ENOENT)
    assert not reasons.is_away(gone)
    other = reasons.other_store("/store", "a" * 32, "b" * 32)
    assert reasons.is_away(other)
    assert not reasons.may_return(other)
    for error in (gone, other):
        assert error.message.startswith(("the store that was at /store", "/store leads to"))
        assert "connect again" in error.message


def test_errors_about_copies_name_both_directories_and_what_to_do() -> None:
    """Agents find each other by the id of a store, which a copy has too."""
    copied = reasons.copied_store("/copy", "/store")
    assert copied.path == "/copy"
    assert "/store is in use on this node. Save to that one" in copied.message
    other = reasons.other_directory("n1", "/store")
    assert other.path == "/store"
    assert "node n1" in other.message
    assert reasons.split_over_copies((3,), "/copy", "/store").startswith(" Rank 3 came with /copy")
    assert reasons.split_over_copies((1, 3), "/copy", "/store").startswith(" Ranks 1, 3 came")
