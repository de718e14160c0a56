"""Another user of the machine, who knows all that is public and tries to take part in a job.

Reads a JSON object on its input: the store, its id, the sockets of its agents (inodes), and files
that are not for others. Writes what it was let do, and all that was said to it.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import zmq

import groupio
from groupio.controller import messages as cm
from groupio.controller.keys import Keys
from groupio.controller.transport import ControlClient
from groupio.fabric.base import Want
from groupio.fabric.tcp import TcpFabric
from groupio.protocol.linkframe import Frame, FrameKind, encode_frame
from groupio.protocol.wireform import WireForm

NOBODY = 65534
WAIT_S = 0.4


def listening(inodes: set[str]) -> list[int]:
    """The ports of these sockets, as every user can read them."""
    found = []
    with open("/proc/net/tcp", encoding="utf-8") as table:
        for line in list(table)[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                found.append(int(fields[1].rpartition(":")[2], 16))
    return sorted(found)


def read_all(port: int, data: bytes) -> bytes:
    """What is said to ``data`` on a plain connection."""
    said = b""
    with socket.create_connection(("127.0.0.1", port), 5) as sock:
        sock.settimeout(WAIT_S)
        sock.sendall(data)
        try:
            while piece := sock.recv(1 << 16):
                said += piece
        except (TimeoutError, ConnectionError):
            pass
    return said


def plain_zmq(port: int) -> list[bytes]:
    """What a listener answers to the opening of a link without a key."""
    context = zmq.Context()
    sock = context.socket(zmq.DEALER)
    sock.connect(f"tcp://127.0.0.1:{port}")
    sock.send(encode_frame(Frame("a" * 32 + ".1", "", FrameKind.OPEN)))
    said = sock.recv_multipart() if sock.poll(WAIT_S * 1000) else []
    context.destroy(linger=0)
    return said


async def join(port: int, keys: Keys, about: dict[str, Any]) -> list[str]:
    """What the listener says to an agent with these keys that wants to join the job."""
    said: list[str] = []
    client = ControlClient(
        asyncio.get_running_loop(),
        f"tcp://127.0.0.1:{port}",
        keys,
        life="a" * 32,
        on_message=lambda payload: said.append(payload.decode("latin-1")),
    )
    version, release = cm.CONTROL_VERSION, groupio.__version__
    store, store_id, job = about["store"], about["store_id"], about["job"]
    hello = cm.NodeHello(version, release, "n7", "a" * 32, job, store, store_id, 1)
    client.send(WireForm(cm.FROM_NODE).encode(hello))
    await asyncio.sleep(WAIT_S)
    client.close()
    return said


def _join_nobody(about: dict[str, Any]) -> Callable[[int], list[str]]:
    return lambda port: asyncio.run(join(port, Keys.make(), about))


def pull(port: int, token: bytes | None, about: dict[str, Any]) -> str:
    """Why no chunk of the store comes."""
    with TcpFabric() as fabric:
        if token is not None:
            fabric.trust(about["store_id"], token)
        want = Want(bytes.fromhex(about["digest"]), 0, 8, memoryview(bytearray(8)))
        deadline = time.monotonic() + 1.5
        address = f"tcp://127.0.0.1:{port}"
        return fabric.pull(address, about["store_id"], [want], deadline=deadline)[0].error


def opened(path: str) -> str:
    """Why a file or socket cannot be used; "" when it can."""
    try:
        if path.endswith(".sock"):
            with socket.socket(socket.AF_UNIX) as sock:
                sock.connect(path)
        else:
            os.close(os.open(path, os.O_RDONLY))
    except OSError as error:
        return error.strerror or "?"
    return ""


def main() -> None:
    about = json.load(sys.stdin)
    # Against a port where there is nobody: other users may not read what is imported on the way.
    for rehearse in (plain_zmq, lambda port: pull(port, b"x", about), _join_nobody(about)):
        rehearse(1)
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)
    ports = listening(set(about["inodes"]))
    identity = about["store_id"].encode()
    guesses = [
        Keys.from_token(identity),
        replace(Keys.from_token(bytes.fromhex(about["store_id"])), of_store=True),
        Keys.make(),
    ]
    hellos = [b"", b"\xff" + bytes(8) + b"\x7f\x03" + bytes(54), b"gioFabr1" + bytes(32) + b"\x00"]
    result = {
        "ports": ports,
        "plain": [read_all(port, hello).hex() for port in ports for hello in hellos],
        "zmq": [[part.hex() for part in plain_zmq(port)] for port in ports],
        "joined": [
            asyncio.run(join(port, keys, about)) for port in ports for keys in guesses
        ],
        "pulled": [
            pull(port, token, about) for port in ports for token in (None, b"", identity)
        ],
        "opened": {path: opened(path) for path in about["private"]},
    }  # fmt: skip
    json.dump(result, sys.stdout)


if __name__ == "__main__":
    main()
