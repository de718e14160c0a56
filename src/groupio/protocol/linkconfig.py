"""The patience and the limits of a link, see :mod:`groupio.protocol.link`."""

from __future__ import annotations

from dataclasses import dataclass

from groupio.protocol.linkframe import FRAGMENT_BYTES_MAX


@dataclass(frozen=True, slots=True)
class LinkConfig:
    """Times in seconds, sizes in bytes; both ends of a session use the same."""

    heartbeat_s: float = 1.0
    """An end that had nothing to say for so long sends an ACK."""
    silence_s: float = 8.0
    """The session ends when nothing was heard for so long."""
    probe_s: float = 0.25
    """A peer in doubt is asked for a sign of life so often."""
    probes: int = 4
    """The session ends when the peer in doubt answered none of so many."""
    retry_s: float = 0.5
    """First wait for an acknowledgement before a frame is sent again; doubles with each try."""
    retry_max_s: float = 2.0
    """Longest such wait."""
    ack_delay_s: float = 0.03
    """An ACK waits so long for data that could carry it."""
    fragment_bytes: int = 256 << 10
    """Longer messages travel as several frames, so that none keeps the others waiting."""
    window_bytes: int = 4 << 20
    """Most bytes sent and not acknowledged, and most that are kept out of order."""
    window_frames: int = 256
    """Most frames sent and not acknowledged; at least one frame may always be under way."""
    message_bytes: int = 512 << 20
    """Longest message."""
    queue_bytes: int = 1 << 30
    """Most bytes that wait to be sent; one more ends the session."""
    queue_frames: int = 1 << 16
    """Most frames that wait to be sent; one more ends the session."""

    def __post_init__(self) -> None:
        assert 0 < self.heartbeat_s * 2 < self.silence_s
        assert 0 < self.retry_s <= self.retry_max_s < self.silence_s
        assert 0 <= self.ack_delay_s < self.retry_s
        assert 0 < self.doubt_s < self.silence_s
        assert 0 < self.fragment_bytes <= min(FRAGMENT_BYTES_MAX, self.window_bytes)
        assert self.window_frames > 0

    @property
    def doubt_s(self) -> float:
        """A peer that is to be in doubt no more answers within this time."""
        return self.probes * self.probe_s

    @property
    def stall_s(self) -> float:
        """The session ends when the peer lives but acknowledges nothing for so long."""
        return 2 * self.silence_s
