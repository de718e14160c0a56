"""Measures the rates of this node's links from the transfers that use them.

A plan needs the free share of a link, not the rate of its port: what the job's own traffic and
other jobs leave. The best of the last transfers is what there is; where a rate was given, it is
the limit. A fabric that does not work is left out of plans until a probe gets through again. A
peer whose agent is gone says nothing of the fabric: its machine answered.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor

from groupio.fabric.base import (
    CLOSED,
    DEADLINE,
    GONE,
    LOST,
    REFUSED,
    Fabric,
    FabricFailed,
    Outcome,
)
from groupio.model import NodeLink

log = logging.getLogger(__name__)

UNKNOWN_BYTES_PER_S = 1e9
"""What a link is taken for until it was given or measured."""

SAMPLE_BYTES_MIN = 4 << 20
"""Shorter transfers say more about latency than about bandwidth."""

SAMPLES = 8

CHANGE_MIN = 0.25
"""Plans hear of a rate only when it changed by so much: each change ends the plan cache's use."""

PROBE_BYTES = 1 << 20
PROBES_MAX = 12
"""A peer that did not answer for so many probes is gone: that says nothing of the fabric."""

PEERS_MAX = 4
"""So many peers that bytes came from last are probed where another one does not answer."""

PROBE_S = 5.0
"""A fabric that failed is tried again after so long."""


class Links:
    """This node's links. Thread-safe; ``changed(link)`` is called from any thread."""

    def __init__(
        self,
        node: str,
        domain: str,
        *,
        uplink: float | None,
        fabric: float | None,
        engine: Fabric,
        pool: Executor,
        changed: Callable[[NodeLink], None],
    ) -> None:
        """``uplink`` and ``fabric`` are the given rates in bytes per second, if there are any."""
        self._node, self._domain = node, domain
        self._given = (uplink, fabric)
        self._engine = engine
        self._pool = pool
        self._changed = changed
        self._lock = threading.Lock()
        self._samples: tuple[deque[float], deque[float]] = (
            deque(maxlen=SAMPLES),
            deque(maxlen=SAMPLES),
        )
        self._peers: dict[str, str] = {}
        """Peers that bytes came from, the last one last: address and job."""
        self._fabric_ok = True
        self._closed = threading.Event()
        self._link = self._now()

    @property
    def link(self) -> NodeLink:
        """The node as plans see it."""
        with self._lock:
            return self._link

    def wrote(self, nbytes: int, seconds: float) -> None:
        """So many bytes went to the store in that time."""
        self._sample(0, nbytes, seconds)

    def pulled(self, address: str, job: str, outcomes: Sequence[Outcome], seconds: float) -> None:
        """A pull from the peer at ``address`` ended; 0 ``seconds``: that is no measurement."""
        broken = any(outcome.error in (LOST, DEADLINE) for outcome in outcomes)
        if not broken:
            if any(outcome.ok for outcome in outcomes):
                self._remember(address, job)
                self._works()
            # A peer may have waited for a chunk that did not come, a pull may have been stopped:
            # the time that they took says nothing.
            if all(outcome.ok for outcome in outcomes):
                self._sample(1, sum(outcome.bytes for outcome in outcomes), seconds)
            return
        with self._lock:
            if not self._fabric_ok or self._closed.is_set():
                return
            self._fabric_ok = False
        log.warning("the fabric to %s does not work: plans do without it for now", address)
        self._tell()
        self._pool.submit(self._probe, address, job)

    def close(self) -> None:
        """Probe no more."""
        self._closed.set()

    def _probe(self, address: str, job: str) -> None:
        """Try peers until one answers, bytes came, or the first is given up as gone."""
        for _ in range(PROBES_MAX):
            if self._closed.wait(PROBE_S) or self._fabric_ok:
                return
            with self._lock:
                others = [peer for peer in self._peers.items() if peer[0] != address]
            for peer in ((address, job), *reversed(others)):
                if self._closed.is_set() or self._answers(*peer):
                    return
        self._works()

    def _answers(self, address: str, job: str) -> bool:
        """A probe of the peer says that the fabric works, or that there is none any more."""
        try:
            self._engine.probe(address, job, PROBE_BYTES, time.monotonic() + PROBE_S)
        except FabricFailed as error:
            if error.reason == CLOSED:
                return True
            if error.reason not in (REFUSED, GONE):  # else it is the peer that gives nothing
                log.info("the fabric to %s still does not work: %s", address, error)
                return False
        except Exception:
            # Nobody would try the fabric again if this ended here.
            log.exception("a probe of the fabric to %s failed", address)
            return False
        self._works()
        return True

    def _remember(self, address: str, job: str) -> None:
        with self._lock:
            self._peers.pop(address, None)
            self._peers[address] = job
            while len(self._peers) > PEERS_MAX:
                del self._peers[next(iter(self._peers))]

    def _works(self) -> None:
        """Bytes came over the fabric, or the peer that none came from is gone."""
        with self._lock:
            if self._fabric_ok:
                return
            self._fabric_ok = True
        log.warning("the fabric is used again")
        self._tell()

    def _sample(self, which: int, nbytes: int, seconds: float) -> None:
        if nbytes < SAMPLE_BYTES_MIN or seconds <= 0:
            return
        with self._lock:
            self._samples[which].append(nbytes / seconds)
        self._tell()

    def _tell(self) -> None:
        with self._lock:
            before, now = self._link, self._now()
            same = before.fabric_ok == now.fabric_ok and all(
                abs(new - old) < CHANGE_MIN * old
                for old, new in (
                    (before.uplink_bytes_per_s, now.uplink_bytes_per_s),
                    (before.fabric_bytes_per_s, now.fabric_bytes_per_s),
                )
            )
            if same:
                return
            self._link = now
        self._changed(now)

    def _now(self) -> NodeLink:
        rates = []
        for given, samples in zip(self._given, self._samples, strict=True):
            measured = _rounded(max(samples)) if samples else given or UNKNOWN_BYTES_PER_S
            rates.append(measured if given is None else min(given, measured))
        return NodeLink(self._node, rates[0], rates[1], self._domain, self._fabric_ok)


def _rounded(rate: float) -> float:
    return float(f"{rate:.1e}")
