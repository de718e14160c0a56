"""How an agent finds its controller, keeps to one term, and replaces a controller that is lost."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from groupio.errors import InvalidInput, StorageError
from groupio.protocol import effects as fx
from groupio.protocol import events as ev
from groupio.protocol import following as fo

ME = ("n0", "a" * 32)
OTHER = ("n1", "b" * 32)


def rule(term: int, who: tuple[str, str] = OTHER) -> fo.RuleFound:
    return fo.RuleFound(term, f"tcp://{who[0]}:{term}", *who)


def joined(term: int = 3) -> fo.Following:
    machine = fo.Following(*ME)
    machine.start()
    machine.handle(rule(term))
    machine.handle(fo.LinkUp(term))
    assert machine.joined
    return machine


def kinds(effects: list[Any]) -> list[str]:
    return [type(effect).__name__ for effect in effects]


def test_the_first_agent_of_a_job_rules_it() -> None:
    machine = fo.Following(*ME)
    assert machine.start() == [fo.FindController()]
    assert machine.start() == []
    assert machine.handle(fo.NoRule()) == [fo.Campaign(0)]
    assert machine.handle(fo.NoRule()) == []
    assert machine.handle(rule(1, ME)) == [fo.Host(1)]
    assert machine.hosting
    assert machine.handle(fo.LinkUp(1)) == [fo.SendJoin(1)]
    assert machine.handle(fo.OrderCame(1, "order")) == [fo.Execute("order")]


def test_others_connect_to_who_rules() -> None:
    machine = fo.Following(*ME)
    machine.start()
    effects = machine.handle(rule(3))
    assert effects == [
        fx.StartTimer("follow-give-up", fo.RECONNECT_S),
        fo.ConnectTo(3, "tcp://n1:3"),
    ]
    assert machine.handle(rule(3)) == [], "it connects already"
    assert machine.handle(fo.OrderCame(3, "too early")) == []
    assert machine.handle(fo.LinkUp(2)) == []
    assert machine.handle(fo.LinkUp(3)) == [fx.StopTimer("follow-give-up"), fo.SendJoin(3)]
    assert machine.handle(fo.LinkUp(3)) == []


def test_a_blip_loses_nothing() -> None:
    machine = joined()
    assert kinds(machine.handle(fo.LinkDown(3, "reset"))) == ["StartTimer", "StartTimer"]
    assert machine.handle(ev.TimerFired("follow-retry")) == [fo.ConnectTo(3, "tcp://n1:3")]
    assert kinds(machine.handle(fo.LinkDown(3, "refused"))) == ["StartTimer"]
    assert machine.handle(fo.LinkUp(3))[-1] == fo.SendJoin(3)
    assert machine.handle(ev.TimerFired("follow-retry")) == [], "it was stopped"


def test_a_controller_that_stays_away_is_replaced() -> None:
    machine = joined()
    machine.handle(fo.LinkDown(3, "reset"))
    effects = machine.handle(ev.TimerFired("follow-give-up"))
    assert effects == [fx.StopTimer("follow-retry"), fo.Campaign(3)]
    assert machine.handle(fo.LinkDown(3, "late news")) == []
    assert machine.handle(rule(4, ME)) == [fo.LeaveTerm(3), fo.Host(4)]


def test_while_the_coordinator_is_silent_the_old_controller_may_come_back() -> None:
    machine = joined()
    machine.handle(fo.LinkDown(3, "reset"))
    machine.handle(ev.TimerFired("follow-give-up"))
    error = StorageError("no answer")
    for delay_s in (1.0, 2.0, 4.0):
        assert machine.handle(fo.CoordinatorFailed(error)) == [
            fx.StartTimer("follow-again", delay_s)
        ]
        assert machine.handle(fo.CoordinatorFailed(error)) == [], "the timer runs"
        machine._failures -= 1
        assert machine.handle(ev.TimerFired("follow-again")) == [
            fo.Campaign(3),
            fo.ConnectTo(3, "tcp://n1:3"),
        ]
    assert machine.error is error
    assert machine.handle(fo.LinkUp(3)) == [fo.SendJoin(3)]
    assert machine.error is None
    assert machine.handle(fo.CoordinatorFailed(error)) == [], "nobody needs it now"


def test_a_coordinator_that_does_not_answer_at_first_is_asked_again() -> None:
    machine = fo.Following(*ME)
    machine.start()
    machine.handle(fo.CoordinatorFailed(StorageError("no answer")))
    assert machine.handle(ev.TimerFired("follow-again")) == [fo.FindController()]
    machine.handle(fo.NoRule())
    machine.handle(fo.CoordinatorFailed(StorageError("no answer")))
    assert machine.handle(ev.TimerFired("follow-again")) == [fo.Campaign(0)]


def test_a_higher_term_wins_at_any_time() -> None:
    machine = joined(3)
    assert machine.handle(rule(2)) == []
    assert kinds(machine.handle(rule(5))) == ["LeaveTerm", "StartTimer", "ConnectTo"]
    assert machine.handle(fo.OrderCame(3, "of the deposed one")) == []
    host = fo.Following(*ME)
    host.start()
    host.handle(rule(1, ME))
    assert kinds(host.handle(rule(2))) == ["StopHosting", "LeaveTerm", "StartTimer", "ConnectTo"]
    assert not host.hosting


def test_an_order_of_an_unknown_term_is_asked_about() -> None:
    machine = joined(3)
    assert machine.handle(fo.OrderCame(4, "order")) == [fo.FindController()]
    assert machine.handle(fo.OrderCame(4, "order")) == []
    # The coordinator knows of no other one: the agent goes on as before.
    assert kinds(machine.handle(rule(3))) == ["StartTimer", "ConnectTo"]


def test_a_refused_agent_tries_again_and_replaces_nobody() -> None:
    machine = joined(3)
    error = InvalidInput("two agents of one name")
    assert machine.handle(fo.JoinRefused(2, error)) == []
    assert machine.handle(fo.JoinRefused(3, error)) == [
        fx.StartTimer("follow-retry", fo.REFUSED_RETRY_S)
    ]
    assert machine.error is error
    assert machine.handle(ev.TimerFired("follow-retry")) == [fo.ConnectTo(3, "tcp://n1:3")]


def test_an_unknown_event_is_a_defect_of_the_driver() -> None:
    with pytest.raises(AssertionError, match="following got"):
        fo.Following(*ME).handle(ev.Drain())


EVENTS = st.one_of(
    st.builds(rule, st.integers(1, 5), st.sampled_from([ME, OTHER])),
    st.just(fo.NoRule()),
    st.just(fo.CoordinatorFailed(StorageError("no"))),
    st.builds(fo.LinkUp, st.integers(1, 5)),
    st.builds(fo.LinkDown, st.integers(1, 5), st.just("why")),
    st.builds(fo.JoinRefused, st.integers(1, 5), st.just(InvalidInput("no"))),
    st.builds(fo.OrderCame, st.integers(1, 5), st.just("order")),
    st.builds(ev.TimerFired, st.sampled_from(["follow-give-up", "follow-retry", "follow-again"])),
)


@given(st.lists(EVENTS, max_size=60))
def test_terms_only_grow_and_one_rule_is_obeyed(events: list[Any]) -> None:
    machine = fo.Following(*ME)
    machine.start()
    hosted = 0
    for event in events:
        before = machine.term
        for effect in machine.handle(event):
            if isinstance(effect, fo.Execute):
                assert event.term == machine.term
            if isinstance(effect, fo.StopHosting):
                assert effect.term == hosted
                hosted = 0
            if isinstance(effect, fo.Host):
                assert not hosted
                hosted = effect.term
        assert machine.term >= before
        assert machine.hosting == (hosted == machine.term and hosted > 0)


def test_a_controller_whose_process_ended_is_replaced_sooner() -> None:
    machine = joined()
    effects = machine.handle(fo.LinkDown(3, "its connection was closed", vanished=True))
    assert effects[0] == fx.StartTimer("follow-give-up", fo.VANISHED_S)
    assert fo.RETRY_S < fo.VANISHED_S < fo.RECONNECT_S
    assert machine.handle(ev.TimerFired("follow-retry")) == [fo.ConnectTo(3, "tcp://n1:3")]
    assert machine.handle(fo.LinkUp(3))[-1] == fo.SendJoin(3), "it was there after all"
    machine.handle(fo.LinkDown(3, "nothing was heard"))
    machine.handle(ev.TimerFired("follow-give-up"))
    assert machine.handle(rule(4, ME))[-1] == fo.Host(4), "nothing is known of it now"


def test_one_that_takes_no_connection_is_not_waited_for() -> None:
    machine = fo.Following(*ME)
    machine.start()
    machine.handle(rule(3))
    effects = machine.handle(fo.LinkDown(3, "it takes no connection", vanished=True))
    assert effects[:2] == [
        fx.StopTimer("follow-give-up"),
        fx.StartTimer("follow-give-up", fo.VANISHED_S),
    ]
    machine.handle(ev.TimerFired("follow-retry"))
    effects = machine.handle(fo.LinkDown(3, "it takes no connection", vanished=True))
    assert kinds(effects) == ["StartTimer"], "the same time goes on"
    assert machine.handle(ev.TimerFired("follow-give-up"))[-1] == fo.Campaign(3)
    assert machine.handle(rule(4, ME)) == [fo.LeaveTerm(3), fo.Host(4, OTHER)]
    assert machine.handle(fo.LinkUp(4)) == [fo.SendJoin(4)]


def test_a_controller_that_says_that_it_ends_is_replaced_at_once() -> None:
    machine = joined()
    assert machine.handle(fo.RulerLeft(2)) == [], "of an earlier rule"
    assert machine.handle(fo.RulerLeft(3)) == [fo.Campaign(3)]
    assert machine.handle(fo.RulerLeft(3)) == []
    assert machine.handle(fo.LinkDown(3, "the controller's agent ends")) == []
    assert kinds(machine.handle(rule(4))) == ["LeaveTerm", "StartTimer", "ConnectTo"]


def test_a_controller_may_say_so_while_the_link_is_made_anew() -> None:
    machine = joined()
    machine.handle(fo.LinkDown(3, "reset"))
    effects = machine.handle(fo.RulerLeft(3))
    assert kinds(effects) == ["StopTimer", "StopTimer", "Campaign"]
    assert machine.handle(ev.TimerFired("follow-give-up")) == []


def test_an_own_controller_is_told_by_nobody() -> None:
    machine = fo.Following(*ME)
    machine.start()
    machine.handle(rule(1, ME))
    machine.handle(fo.LinkUp(1))
    assert machine.handle(fo.RulerLeft(1)) == []
