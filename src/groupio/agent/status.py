"""What ``groupio status`` shows: the agent, its memory, its jobs and who waits for whom."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any

import groupio
from groupio.protocol.ledger import Use

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
            "log": str(driver.residence.paths.log),
            "runtime_dir": str(driver.residence.paths.directory),
            "draining": driver.draining,
            "memory": {
                "budget": ledger.budget,
                "leased": ledger.total(Use.LEASED),
                "quarantined": ledger.total(Use.QUARANTINED),
                "free": ledger.total(Use.FREE),
            },
        },
        "jobs": [_job(driver, job) for job in driver.jobs.values()],
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


def _job(driver: Driver, job: Job) -> dict[str, Any]:
    controller, now = job.host.controller, time.monotonic()
    incarnation = controller.incarnation
    return {
        "store": job.path,
        "job": job.store.job,
        "incarnation": incarnation.number if incarnation is not None else None,
        "lineage": controller.lineage if controller.lineages else None,
        "last_committed": controller.latest if controller.latest >= 0 else None,
        "io_mode": job.store.io_mode or None,
        "groups": [
            {
                "epoch": group.epoch,
                "phase": str(group.phase),
                "world_size": group.world_size,
                "missing": list(group.missing),
                "copied": sum(seat.copied for seat in group.seats.values()),
                "age_s": round(now - group.first.at + group.first.elapsed_s, 3),
            }
            for group in controller.groups.values()
        ],
    }
