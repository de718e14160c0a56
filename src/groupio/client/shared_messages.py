"""Messages between the ranks of one host that read an epoch together.

All talk passes through the *hub*, the lowest rank of the host. Ranks are numbered within the host,
0 is the hub. ``round`` counts the fills of one load: what belongs to an earlier one is passed over.
"""

from __future__ import annotations

from typing import Any

import msgspec


class Hello(msgspec.Struct, tag="hello", array_like=True):
    """The first word of a rank to the hub; ``token`` is what the hub told all ranks of the job.

    Also the hub's answer, without a token, where the ranks make sure that all have come.
    """

    rank: int
    token: str


class Join(msgspec.Struct, tag="join", array_like=True):
    """What a rank wants: one bit per chunk of the epoch's table, which ``table`` identifies.

    A rank that wants nothing and has not looked at the table says so with an empty ``table``.
    """

    round: int
    rank: int
    table: bytes
    rows: bytes


class Begin(msgspec.Struct, tag="begin", array_like=True):
    """What all ranks want, from the hub; the window's descriptor comes with it.

    ``alone``: no window (none is needed, or ``note`` says why there is none), each rank reads
    what it wants itself.
    """

    round: int
    rows: list[bytes]
    alone: bool = False
    note: str = ""


class Ready(msgspec.Struct, tag="ready", array_like=True):
    """A batch of ``reader`` is in ``slot`` and verified; ``bad`` of its chunks are damaged."""

    round: int
    reader: int
    batch: int
    slot: int
    bad: list[int]


class Copied(msgspec.Struct, tag="copied", array_like=True):
    """A rank needs this batch of ``reader`` no more."""

    round: int
    reader: int
    batch: int


class Free(msgspec.Struct, tag="free", array_like=True):
    """To the reader: no other rank needs this batch any more."""

    round: int
    batch: int


class Done(msgspec.Struct, tag="done", array_like=True):
    """A rank has all it wants and has read all it had to read for others."""

    round: int
    rank: int


class Failed(msgspec.Struct, tag="failed", array_like=True):
    """The reading is given up; ``error`` (see ``errors.to_wire``) names the rank."""

    round: int
    error: dict[str, Any]


Message = Hello | Join | Begin | Ready | Copied | Free | Done | Failed
