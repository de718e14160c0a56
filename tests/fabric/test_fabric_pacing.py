"""The pace of a fabric: rates, debts, shares and pauses, on a clock that the tests move."""

from __future__ import annotations

import threading
import time

import pytest

from groupio.errors import InvalidInput
from groupio.fabric.open import open_fabric
from groupio.fabric.pacing import BURST_S, SLICE_S, Bucket, Pacer
from groupio.settings import Settings


class Clock:
    """A clock that moves when it is told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def passes(bucket: Bucket, nbytes: int, clock: Clock) -> bool:
    """Whether so many bytes may move at this moment."""
    try:
        bucket.take(nbytes, clock.now)
    except TimeoutError:
        return False
    return True


def moved(bucket: Bucket, clock: Clock, seconds: float, piece: int = 1000) -> int:
    """Bytes that pass in so many seconds, looked at every 0.1 ms."""
    total, end = 0, clock.now + seconds
    while clock.now < end:
        while passes(bucket, piece, clock):
            total += piece
        clock.now += 0.0001
    return total


def test_without_rate_all_passes() -> None:
    clock = Clock()
    pacer = Pacer(clock=clock)
    assert (pacer.rate, pacer.share) == (None, 1.0)
    assert pacer.sending.is_free
    assert passes(pacer.sending, 1 << 40, clock)
    assert passes(pacer.receiving, 1 << 40, clock)


@pytest.mark.parametrize("share", [1.0, 0.25])
@pytest.mark.parametrize("piece", [1, 1000, 50_000])
def test_rate_times_share_over_time(share: float, piece: int) -> None:
    clock = Clock()
    pacer = Pacer(20_000.0, clock=clock)
    pacer.set_share(share)
    total = moved(pacer.sending, clock, 5.0, piece)
    expected = 100_000 * share
    assert expected - 100 <= total <= expected + 20_000 * BURST_S + piece


def test_directions_have_buckets_of_their_own() -> None:
    clock = Clock()
    pacer = Pacer(1000.0, clock=clock)
    clock.now += 1
    assert passes(pacer.sending, 5000, clock)
    assert not passes(pacer.sending, 1, clock)
    assert passes(pacer.receiving, 5000, clock)


def test_debt_is_paid_before_the_next_byte() -> None:
    clock = Clock()
    pacer = Pacer(1000.0, clock=clock)
    assert passes(pacer.sending, 3000, clock)
    clock.now += 2.9
    assert not passes(pacer.sending, 1, clock)
    clock.now += 0.2
    assert passes(pacer.sending, 1, clock)


def test_idle_bucket_saves_up_only_a_burst() -> None:
    clock = Clock()
    pacer = Pacer(100_000.0, clock=clock)
    clock.now += 3600
    count = 0
    while passes(pacer.sending, 1, clock):
        count += 1
    assert count == pytest.approx(100_000 * BURST_S, abs=2)


def test_pause_stops_all_and_gives_nothing_afterwards() -> None:
    clock = Clock()
    for rate in (None, 1000.0):
        pacer = Pacer(rate, clock=clock)
        pacer.set_share(0)
        assert moved(pacer.sending, clock, 1.0) == 0
        pacer.set_share(1)
        clock.now += 0.01
        assert passes(pacer.sending, 100, clock)


def test_share_of_an_unknown_rate_is_a_share_of_the_time() -> None:
    clock = Clock()
    pacer = Pacer(clock=clock)
    pacer.set_share(0.25)
    open_slots, slots = 0, 4000
    for _ in range(slots):
        open_slots += passes(pacer.sending, 1 << 20, clock)
        clock.now += SLICE_S / 100
    assert open_slots / slots == pytest.approx(0.25, abs=0.02)


def test_rate_may_come_and_go() -> None:
    clock = Clock()
    pacer = Pacer(clock=clock)
    assert passes(pacer.sending, 1 << 40, clock)
    pacer.set_rate(1000.0)
    clock.now += 0.01
    assert passes(pacer.sending, 5000, clock)
    assert not passes(pacer.sending, 1, clock)
    pacer.set_rate(None)
    assert passes(pacer.sending, 1, clock)


def test_waiting_take_is_woken_by_a_change() -> None:
    pacer = Pacer()
    pacer.set_share(0)
    took: list[float] = []

    def take() -> None:
        pacer.sending.take(100, time.monotonic() + 30)
        took.append(time.monotonic())

    thread = threading.Thread(target=take)
    thread.start()
    time.sleep(0.1)
    assert took == []
    pacer.set_share(1)
    thread.join(timeout=10)
    assert len(took) == 1


def test_waiting_take_ends_when_it_is_told_to_stop() -> None:
    pacer, stop = Pacer(), threading.Event()
    pacer.set_share(0)
    thread = threading.Thread(
        target=lambda: pacer.sending.take(100, time.monotonic() + 60, stop.is_set)
    )
    thread.start()
    time.sleep(0.05)
    pacer.sending.wake()
    time.sleep(0.05)
    assert thread.is_alive(), "woken, but not told to stop"
    stop.set()
    pacer.sending.wake()
    thread.join(timeout=10)
    assert not thread.is_alive()


def test_who_measures_hears_of_changes_of_the_share() -> None:
    pacer = Pacer(1000.0)
    pacer.set_share(1)
    assert pacer.changes == 0
    pacer.set_share(0)
    pacer.set_share(1)
    assert pacer.changes == 2


@pytest.mark.parametrize("rate", [None, 5e6])
def test_fabric_of_an_agent_keeps_to_what_is_stated(rate: float | None) -> None:
    settings = Settings(fabric_bytes_per_s=rate)
    with open_fabric(settings, "127.0.0.1", "127.0.0.1", None, 1 << 30) as fabric:
        assert fabric.pace.rate == rate
        assert fabric.pace.sending.is_free == (rate is None)


def test_take_gives_up_at_its_deadline() -> None:
    pacer = Pacer(1000.0)
    pacer.sending.take(100_000, time.monotonic() + 1)
    start = time.monotonic()
    with pytest.raises(TimeoutError):
        pacer.sending.take(1, start + 0.1)
    assert 0.1 <= time.monotonic() - start < 5


@pytest.mark.parametrize("rate", [0, -1.0, float("inf"), float("nan")])
def test_impossible_rates_are_invalid(rate: float) -> None:
    with pytest.raises(InvalidInput):
        Pacer(rate)


@pytest.mark.parametrize("share", [-0.1, 1.1, float("nan")])
def test_impossible_shares_are_invalid(share: float) -> None:
    with pytest.raises(InvalidInput):
        Pacer().set_share(share)


def test_slow_rates_let_small_pieces_pass() -> None:
    bucket = Bucket()
    assert bucket.piece(1 << 20) == 1 << 20
    for rate, share, nbytes in [(1e9, 1.0, 1 << 20), (2e6, 1.0, 200_000), (2e6, 0.5, 100_000)]:
        bucket.set(rate, share)
        assert bucket.piece(1 << 20) == nbytes
    bucket.set(1000.0, 1.0)
    assert bucket.piece(1 << 20) == 64 << 10
    assert bucket.piece(100) == 100
