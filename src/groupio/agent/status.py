"""The answer to ``groupio status``: the agent, its memory, its jobs and who waits for whom."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any

import groupio
from groupio.controller import messages as cm
from groupio.controller.describe import describe
from groupio.protocol.ledger import Ledger, Use

if TYPE_CHECKING:
    from groupio.agent.driver import Driver
    from groupio.agent.job import Job


def status(driver: Driver) -> dict[str, Any]:
    """The agent's state as plain values; sizes in bytes, times in seconds."""
    ledger = driver.machine.ledger
    return {
        "agent": {
            "pid": os.getpid(),
            "version": groupio.__version__,
            "node": driver.node,
            "uptime_s": round(time.monotonic() - driver.started_at, 3),
            "processors": len(os.sched_getaffinity(0)),
            "log": str(driver.residence.paths.log),
            "runtime_dir": str(driver.residence.paths.directory),
            "draining": driver.draining,
            "memory": {
                "budget": ledger.budget,
                "leased": ledger.total(Use.LEASED),
                "quarantined": ledger.total(Use.QUARANTINED),
                "free": ledger.total(Use.FREE),
            },
            "pace": {
                "uplink_bytes_per_s": driver.settings.uplink_bytes_per_s,
                "fabric_bytes_per_s": driver.settings.fabric_bytes_per_s,
                "share": driver.foreground.share,
                "held_s": round(driver.uplink.held_s, 3),
            },
            "cache_bytes": _cache_bytes(ledger),
            "index_bytes": index_bytes(driver),
        },
        "jobs": [_job(job) for job in driver.jobs.values()],
        "clients": [
            {
                "pid": peer.process.pid,
                "rank": peer.hello.rank,
                "world_size": peer.hello.world_size,
                "store": peer.hello.store,
            }
            for peer in driver.clients.values()
            if peer.hello is not None and peer.connected
        ],
    }


def tell_memory(driver: Driver, job: Job) -> None:
    """Tell the job's controller what this node's memory is used for."""
    ledger = driver.machine.ledger
    leased = ledger.total(Use.LEASED)
    said = cm.NodeMemory(driver.node, ledger.budget, leased, _cache_bytes(ledger))
    if job.host is not None:
        job.host.lines.memory[driver.node] = said
    elif job.joining is not None:
        job.joining.tell_swarm(said)


def index_bytes(driver: Driver) -> int:
    """What is known of the chunks of older epochs takes so much, outside the budget."""
    return sum(job.store.known.index.nbytes for job in driver.jobs.values())


def _cache_bytes(ledger: Ledger) -> int:
    return sum(e.length for e in ledger.extents if e.content is not None)


def _job(job: Job) -> dict[str, Any]:
    if job.host is not None:
        return {**describe(job.host), "controller": "here"}
    assert job.joining is not None
    joined = job.joining.joined
    return {
        "store": job.path,
        "job": job.store.job,
        "controller": job.joining.where.address or str(job.joining.where.kind),
        "term": job.joining.term,
        "joined": joined,
        "why_not": None if joined else job.joining.unjoined.why or None,
        "groups": [],
    }
