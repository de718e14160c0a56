"""Groups the ranks of a process group by host, and lets them read together there."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

from groupio.client.shared_link import Address, Link, LinkFailed, Meeting, host_identity
from groupio.client.shared_read import GroupedRead

log = logging.getLogger("groupio.torch")

LINK_S = 20.0
"""Ranks of one host that have agreed to read together reach each other within this time."""


class Host:
    """How a rank comes to read with the others of its host, in two decisions of all members.

    All say :meth:`where` they are; once everyone's answers are known each calls :meth:`link`. All
    say whether they are :meth:`linked`; those answers give the :meth:`reading`, which the caller
    closes. What is said may be part of other decisions. Leaving the context ends what was not
    handed out.
    """

    def __init__(self, alone: bool = False) -> None:
        """``alone``: there are no other members."""
        self._rank = 0
        self._meeting: Meeting | None = None
        self._link: Link | None = None
        self._why = ""
        self._identity = "" if alone else host_identity()
        if not alone:
            try:
                self._meeting = Meeting()
            except OSError as error:
                self._why = f"{type(error).__name__}: {error}"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End what was not handed out. Safe to repeat."""
        if self._meeting is not None:
            self._meeting.close()
        self._hang_up()

    def where(self) -> dict[str, Any]:
        """The first word of this rank: its host, and how to reach it there."""
        address = list(self._meeting.address) if self._meeting is not None else []
        return {"host": self._identity, "address": address, "why": self._why}

    def link(self, rank: int, opinions: Sequence[dict[str, Any]]) -> None:
        """Connect with the ranks of this host, if there are others; waits at most LINK_S.

        ``opinions`` are what all said, by rank, and ``rank`` is this one's place in them.
        """
        self._rank = rank
        try:
            self._link = self._linked_with(opinions)
        except LinkFailed as error:
            self._why = f"rank {self._rank}: {error}"
        finally:
            if self._meeting is not None:
                self._meeting.close()

    def _linked_with(self, opinions: Sequence[dict[str, Any]]) -> Link | None:
        ranks = [place for place, one in enumerate(opinions) if one["host"] == self._identity]
        if len(ranks) == 1:
            self._why = ""
        if len(ranks) == 1 or self._meeting is None:
            return None
        silent = [place for place in ranks if not opinions[place]["address"]]
        if silent:
            self._why = f"rank {silent[0]}: {opinions[silent[0]]['why']}"
            return None
        hub = Address(*opinions[ranks[0]]["address"])
        return self._meeting.link(ranks, self._rank, hub, LINK_S)

    def linked(self) -> dict[str, Any]:
        """The second word of this rank: why it cannot reach the others, "" when it can."""
        return {"host": self._identity, "why": self._why}

    def reading(self, said: Sequence[dict[str, Any]]) -> GroupedRead:
        """This rank's part in the grouped read, now that all have said the second word."""
        reasons = [one["why"] for one in said if one["host"] == self._identity and one["why"]]
        if not reasons:
            link, self._link = self._link, None
            return GroupedRead(link)
        self._hang_up()
        note = (
            f"the ranks of a host read by themselves: they cannot reach each other ({reasons[0]})"
        )
        log.warning("%s", note)
        return GroupedRead(None, [note])

    def reading_at_once(self) -> GroupedRead:
        """The same without a second decision: the lowest rank of the host sees who has come.

        All ranks of the host call it after :meth:`link`; one that is LINK_S late makes all of
        them read by themselves.
        """
        if self._link is not None:
            try:
                self._link.confirm(LINK_S)
            except LinkFailed as error:
                self._why = f"rank {self._rank}: {error}"
        return self.reading([self.linked()])

    def _hang_up(self) -> None:
        link, self._link = self._link, None
        if link is not None:
            link.close()
