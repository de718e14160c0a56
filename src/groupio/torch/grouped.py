"""Which ranks of a process group share a host, and how they come to read together there."""

from __future__ import annotations

import logging
from typing import Any

from groupio.client.shared_link import Address, Link, LinkFailed, Meeting, host_identity
from groupio.client.shared_read import GroupedRead
from groupio.torch.members import Council, Members

log = logging.getLogger("groupio.torch")

LINK_S = 20.0
"""Ranks of one host that have agreed to read together reach each other within this time."""


def read_together(members: Members, council: Council) -> GroupedRead:
    """This rank's part in the grouped read of its host; close it after the load.

    Every member calls it at the same place of the council's series: it decides twice. Ranks of
    other hosts, network namespaces or users read on their own or among themselves. Where the
    ranks of a host cannot reach each other all of them read by themselves, which ``notes`` of
    the result says. Raises what the council raises.
    """
    if council.alone:
        return GroupedRead(None)
    try:
        meeting = Meeting()
    except OSError as error:
        return _settle(council, _Host(None, f"{type(error).__name__}: {error}"))
    try:
        return _settle(council, _Host(meeting, ""), members.rank)
    finally:
        meeting.close()


class _Host:
    """What this rank knows of how to reach the others."""

    def __init__(self, meeting: Meeting | None, why: str) -> None:
        self.meeting = meeting
        self.why = why
        self.identity = host_identity()

    def opinion(self) -> dict[str, Any]:
        address = list(self.meeting.address) if self.meeting is not None else []
        return {"host": self.identity, "address": address, "why": self.why}

    def link(self, opinions: list[dict[str, Any]], rank: int) -> Link | None:
        """The link to the ranks of this host; None when there are no others or it failed."""
        ranks = [place for place, one in enumerate(opinions) if one["host"] == self.identity]
        if len(ranks) == 1:
            self.why = ""
        if len(ranks) == 1 or self.meeting is None:
            return None
        silent = [place for place in ranks if not opinions[place]["address"]]
        if silent:
            self.why = f"rank {silent[0]}: {opinions[silent[0]]['why']}"
            return None
        hub = Address(*opinions[ranks[0]]["address"])
        try:
            return self.meeting.link(ranks, rank, hub, LINK_S)
        except LinkFailed as error:
            self.why = f"rank {rank}: {error}"
            return None


def _settle(council: Council, host: _Host, rank: int = 0) -> GroupedRead:
    opinions = council.decide(host.opinion(), lambda all_: {"members": all_})["members"]
    link = host.link(opinions, rank)
    try:
        mine = {"host": host.identity, "why": host.why}
        said = council.decide(mine, lambda all_: {"members": all_})["members"]
    except BaseException:
        if link is not None:
            link.close()
        raise
    reasons = [one["why"] for one in said if one["host"] == host.identity and one["why"]]
    if not reasons:
        return GroupedRead(link)
    if link is not None:
        link.close()
    note = f"the ranks of a host read by themselves: they cannot reach each other ({reasons[0]})"
    log.warning("%s", note)
    return GroupedRead(None, [note])
