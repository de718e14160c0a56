"""Connects the ranks of one host: an abstract Unix socket of the lowest of them.

An abstract name needs no directory and is gone with its process; it is seen in one network
namespace only, and any user may connect to it: both sides check who the other one is.
"""

from __future__ import annotations

import os
import secrets
import select
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from groupio.client.shared_messages import Hello, Message
from groupio.wire import Channel, ChannelClosed

_HELLO_S = 5.0
"""A rank that has connected says who it is within this time, in seconds."""


class LinkFailed(Exception):
    """The ranks of a host cannot reach each other; the message says why. Internal."""


class Address(NamedTuple):
    """Where a rank listens, and the secret that shows that a caller belongs to the job."""

    name: str
    token: str


class Link:
    """The connections of one rank to the others of its host.

    ``ranks`` are those of the host, ascending; ``me`` is this one's place among them. Place 0,
    the hub, has a channel to each of the others, the others have one to place 0.
    """

    def __init__(self, ranks: Sequence[int], me: int, channels: dict[int, Channel]) -> None:
        self.ranks = tuple(ranks)
        self.me = me
        self.channels = channels

    def confirm(self, timeout_s: float) -> None:
        """Make sure that every rank of the host has its link: the hub says so once it has all.

        LinkFailed on a rank that does not hear it in time; the others then find the link closed.
        """
        deadline = time.monotonic() + timeout_s
        try:
            for channel in self.channels.values():
                left = max(deadline - time.monotonic(), 0.01)
                if self.me == 0:
                    channel.send(Hello(0, ""), timeout_s=left)
                elif not isinstance(channel.recv(left).message, Hello):
                    raise OSError("the lowest rank said something else")
        except (OSError, TimeoutError, ChannelClosed) as error:
            self.close()
            raise LinkFailed(f"{type(error).__name__}: {error}") from error

    def close(self) -> None:
        """Hang up; the others see it at once."""
        for channel in self.channels.values():
            channel.close()


class Meeting:
    """A rank's listening socket, open until it is known who is the lowest on the host."""

    def __init__(self) -> None:
        self.address = Address(f"groupio-read-{secrets.token_hex(12)}", secrets.token_hex(16))
        """Tell it to the other ranks."""
        self._socket = _socket()
        try:
            self._socket.bind("\0" + self.address.name)
            self._socket.listen(256)
            self._socket.setblocking(False)
        except BaseException:
            self._socket.close()
            raise

    def close(self) -> None:
        """Listen no more. Safe to repeat."""
        self._socket.close()

    def link(self, ranks: Sequence[int], rank: int, hub: Address, timeout_s: float) -> Link:
        """Connect this ``rank`` with the others of its host; ``hub`` is the lowest's address.

        LinkFailed when that does not come about in time.
        """
        me = list(ranks).index(rank)
        deadline = time.monotonic() + timeout_s
        channels: dict[int, Channel] = {}
        try:
            if me == 0:
                self._accept(len(ranks), channels, deadline)
            else:
                channels[0] = _call(hub, me, deadline)
        except (OSError, TimeoutError, ChannelClosed) as error:
            for channel in channels.values():
                channel.close()
            raise LinkFailed(f"{type(error).__name__}: {error}") from error
        return Link(ranks, me, channels)

    def _accept(self, count: int, channels: dict[int, Channel], deadline: float) -> None:
        while len(channels) < count - 1:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self._socket], [], [], left)[0]:
                raise TimeoutError(f"{len(channels)} of {count - 1} ranks connected in time")
            try:
                connection, _ = self._socket.accept()
            except BlockingIOError:
                continue
            channel = Channel(connection, Message)
            place = _who(channel, self.address.token, deadline)
            if 0 < place < count and place not in channels:
                channels[place] = channel
            else:
                channel.close()  # a stranger


def host_identity() -> str:
    """Equal for processes that can share memory through a socket: same kernel, network
    namespace and user."""
    parts = [str(os.geteuid())]
    try:
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
        parts += [str(os.stat(f"/proc/self/ns/{kind}").st_ino) for kind in ("net", "user")]
    except OSError:
        parts.append(secrets.token_hex(16))  # not known: shares with nobody
    return "-".join(parts)


def _call(hub: Address, me: int, deadline: float) -> Channel:
    connection = _socket()
    try:
        connection.settimeout(max(deadline - time.monotonic(), 0.01))
        connection.connect("\0" + hub.name)
        channel = Channel(connection, Message)
    except BaseException:
        connection.close()
        raise
    try:
        if not _own(channel):
            raise OSError("the address of the lowest rank belongs to another user")
        channel.send(Hello(me, hub.token), timeout_s=_HELLO_S)
    except BaseException:
        channel.close()
        raise
    return channel


def _who(channel: Channel, token: str, deadline: float) -> int:
    """The place that a caller says it has; -1 for a stranger."""
    if not _own(channel):
        return -1
    try:
        timeout_s = min(_HELLO_S, max(deadline - time.monotonic(), 0.01))
        received = channel.recv(timeout_s)
    except (TimeoutError, ChannelClosed):
        return -1
    for fd in received.fds:
        os.close(fd)
    hello = received.message
    known = isinstance(hello, Hello) and secrets.compare_digest(hello.token, token)
    return hello.rank if known else -1


def _own(channel: Channel) -> bool:
    return channel.peer()[1] == os.geteuid()


def _socket() -> socket.socket:
    return socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
