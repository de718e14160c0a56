"""Leadership of a job: one controller at a time, named by a term that only grows.

A coordinator is the place where agents agree on that: a record in the store
(:mod:`groupio.controller.by_store`) or a key in etcd (:mod:`groupio.controller.by_etcd`). Every
driver passes the suite of :mod:`groupio.testing.coordinator_suite`.

What a coordinator gives is a hint with a fence, not a lock: a ruler that was paused may act for a
moment after another has taken over. It does no harm, because its orders carry a lower term and
because an epoch is decided by the one record that is created if absent.

All calls block, may come from any thread, and raise ``ControllerLost`` (the service does not
answer), ``StorageError`` (the store does not), ``FormatError`` (a newer release wrote the record)
or ``InvalidInput``. A ``deadline`` is an instant of ``time.monotonic()``, in seconds.
"""

from __future__ import annotations

import abc
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

import msgspec

from groupio.errors import InvalidInput
from groupio.format.records import ControllerRecord, decode_controller, encode_controller

OnLost = Callable[[str], None]
"""Told why a rule ended, once per rule, from any thread; must not block."""


class Rule(msgspec.Struct, frozen=True):
    """One controller's rule over a job. (node, life) is the agent process that rules.

    ``address`` is where agents reach it, such as ``tcp://host:port``. ``by_token``: agents show
    it the job's token, else the key in the store.
    """

    term: int
    address: str
    node: str
    life: str
    by_token: bool = True


class Coordinator(abc.ABC):
    """Agreement on who rules over one job; see the module for errors and deadlines.

    ``on_lost`` is called as soon as this object learns that its own rule ended otherwise than by
    ``resign`` or ``close``. Closing without ``resign`` leaves things as the death of the process
    would. ``by_token``: see :class:`Rule`.
    """

    def __init__(self, on_lost: OnLost | None = None, *, by_token: bool = True) -> None:
        self._on_lost = on_lost
        self._by_token = by_token
        self._lock = threading.Lock()
        self._held: Rule | None = None

    @property
    def held(self) -> Rule | None:
        """The rule that this object holds as far as it knows, without asking anybody."""
        with self._lock:
            return self._held

    @abc.abstractmethod
    def current(self, deadline: float) -> Rule | None:
        """Who rules now; None when nobody does."""

    @abc.abstractmethod
    def campaign(self, node: str, life: str, address: str, deadline: float, *, over: int) -> Rule:
        """Become the controller in a new term above ``over``, or learn who is.

        ``over`` is the highest term that the caller knows to be of no use (0: none): a rule of a
        higher term is returned as it is. The answer is this caller's own rule if its ``life`` is.
        A driver with leases waits, up to the deadline, for the lease of a rule up to ``over``
        to end (then ControllerLost); one without takes over at once.
        """

    @abc.abstractmethod
    def keep(self) -> bool:
        """Whether the rule of this object still holds; False for good once it has ended.

        A paused process that wakes up learns it here before it acts.
        """

    @abc.abstractmethod
    def resign(self) -> None:
        """Give the rule up, so that another can take over at once. Nothing if none is held."""

    @abc.abstractmethod
    def watch(self, term: int, timeout_s: float) -> Rule | None:
        """Wait for a rule of another term than ``term``.

        None when the time is up, and at once when the rule ``term`` (not 0) is over and nobody
        follows yet: then it is time to campaign.
        """

    @abc.abstractmethod
    def close(self) -> None:
        """Release threads and connections, and end waiting calls. Safe to repeat."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _take(self, rule: Rule) -> None:
        with self._lock:
            self._held = rule

    def _drop(self) -> Rule | None:
        with self._lock:
            held, self._held = self._held, None
        return held

    def _lose(self, rule: Rule, why: str) -> None:
        """The held ``rule`` is over; says so once, and not when another is held by now."""
        with self._lock:
            if self._held != rule:
                return
            self._held = None
        if self._on_lost is not None:
            self._on_lost(why)


def candidate(node: str, life: str, address: str, over: int) -> Rule:
    """The rule right above ``over``; InvalidInput when it could not be recorded."""
    if not address:
        raise InvalidInput("a controller needs an address at which agents reach it")
    rule = Rule(over + 1, address, node, life)
    encode_rule(rule)
    return rule


def encode_rule(rule: Rule) -> bytes:
    """The record of ``rule``; an empty ``address`` says that nobody rules in its term."""
    return encode_controller(
        ControllerRecord(rule.term, rule.address, rule.node, rule.life, time.time(), rule.by_token)
    )


def decode_rule(data: bytes, path: str) -> Rule | None:
    """The rule in a record; None when it says that nobody rules.

    FormatError or IntegrityError(path) when it is no record of a controller.
    """
    record = decode_controller(data, path)
    if not record.address:
        return None
    return Rule(record.term, record.address, record.node, record.life, record.by_token)
