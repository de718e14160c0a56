"""Frames of a link, and their bytes: what two ends say to each other about one session.

An *end* is one side of one session, named by the life of its process and a number that this life
uses once: ``"<life>.<number>"``. A session is a pair of ends. Because no end is ever named twice,
a frame of an earlier life or of an earlier session never fits a later one.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Annotated

import msgspec

from groupio.errors import FormatError

END_CHARS_MAX = 96
"""Longest name of an end, in characters."""

HELLO_BYTES_MAX = 64 << 10
"""Longest hello of an end, in bytes; it is sent before the session stands."""

REASON_CHARS_MAX = 500
"""A longer reason in a BYE is cut."""

FRAGMENT_BYTES_MAX = 1 << 20
"""Most payload bytes of one frame; longer messages travel as several frames."""

FRAME_BYTES_MAX = FRAGMENT_BYTES_MAX + 4096
"""Longest encoded frame, in bytes."""

SEQ_MAX = 1 << 53
"""Highest sequence number; a session does not live to see it."""


class FrameKind(IntEnum):
    """What a frame is for."""

    OPEN = 0
    """The dialling end asks for a session; it does not know its peer yet."""
    ACCEPT = 1
    """The listening end answers; it stays half open until a frame names it as target."""
    DATA = 2
    """A message, or a part of one."""
    ACK = 3
    """Nothing but the acknowledgement: also the heartbeat."""
    BYE = 4
    """The sender's end is no more; the payload is the reason, in UTF-8."""
    PROBE = 5
    """The sender doubts that the receiver lives; it is to answer at once."""


_Name = Annotated[str, msgspec.Meta(max_length=END_CHARS_MAX)]
_Number = Annotated[int, msgspec.Meta(ge=0, le=SEQ_MAX)]


class Frame(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One datagram from the end ``source`` to the end ``target`` ("": not known yet).

    ``seq`` numbers DATA from 1 (0 in other kinds). ``ack``: all DATA up to this number came.
    ``more``: the message goes on in the next DATA. Of ``payload`` a link asks only its length
    and, if it is longer than a fragment, its slices.
    """

    source: _Name
    target: _Name
    kind: FrameKind
    seq: _Number = 0
    ack: _Number = 0
    more: bool = False
    payload: bytes = b""


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(Frame)


def encode_frame(frame: Frame) -> bytes:
    """``frame`` as bytes."""
    return _ENCODER.encode(frame)


def decode_frame(data: bytes | memoryview) -> Frame:
    """The frame that ``data`` encodes; FormatError when it is none or is too long."""
    if len(data) > FRAME_BYTES_MAX:
        raise FormatError(f"a frame of {len(data)} bytes exceeds the limit of {FRAME_BYTES_MAX}")
    try:
        return _DECODER.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise FormatError(f"a frame of {len(data)} bytes cannot be read: {error}") from None


def end_of(life: str, number: int) -> str:
    """The name of an end: ``number`` is used once in this ``life``."""
    return f"{life}.{number}"


def life_of(end: str) -> str:
    """The life of the process that the end belongs to."""
    return end.rpartition(".")[0]


def bye(source: str, target: str, reason: str) -> Frame:
    """The frame that ends a session for the other side."""
    payload = reason[:REASON_CHARS_MAX].encode("utf-8", "replace")
    return Frame(source, target, FrameKind.BYE, payload=payload)


def reject(frame: Frame, reason: str = "there is no such session") -> Frame | None:
    """The answer to a frame that no end here takes, or None where none is due.

    It spares the sender the wait for silence: it speaks to an end that is no more.
    """
    if frame.kind is FrameKind.BYE or not frame.source:
        return None
    return bye(frame.target, frame.source, reason)
