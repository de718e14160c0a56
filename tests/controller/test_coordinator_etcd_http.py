"""What is not etcd, or not well, behind the address of one."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpcore
import pytest
from etcd_help import HOST

from groupio.controller import etcd_http
from groupio.controller.by_etcd import EtcdCoordinator
from groupio.controller.etcd_http import ANSWER_BYTES_MAX, Etcd
from groupio.errors import ControllerLost
from groupio.testing.coordinator_suite import soon


@pytest.fixture
def stranger() -> Iterator[Any]:
    """An HTTP server that gives ``status`` and ``content`` to everybody."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(made.status)
            self.end_headers()
            try:
                for piece in made.content:
                    self.wfile.write(piece)
                    time.sleep(made.pause_s)
            except OSError:
                pass  # the client has heard enough

        def log_message(self, *_: object) -> None:
            pass

    class Server(ThreadingHTTPServer):
        status = 200
        content: Sequence[bytes] = ()
        pause_s = 0.0
        daemon_threads = True

    made = Server((HOST, 0), Handler)
    thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield made
    made.shutdown()
    thread.join(timeout=30)
    made.server_close()


@pytest.mark.parametrize(
    ("status", "content", "why"),
    [
        (200, [b"<html>"], "as etcd does"),
        (200, [b"{}"], "as etcd does"),
        (200, [b'{"responses": 7}'], "as etcd does"),
        (200, [b'{"x":' * 100_000], "as etcd does"),
        (200, [b'{"header":{"revision":' + b"9" * 400 + b"}}"], "as etcd does"),
        (404, [b"[" * 100_000], "refuses kv/txn: 404 ["),
        (404, [b'{"code": 5, "message": "no such lease"}'], "refuses kv/txn: 404 no such lease"),
        (404, [b"not found"], "refuses kv/txn: 404 not found"),
        (401, [b'{"code": 16, "message": "who?"}'], "refuses kv/txn: 401 who?"),
        (503, [b'{"code": 14, "message": "no leader"}'], "does not answer kv/txn: 503 no leader"),
        (200, [b" " * (1 << 16)] * (2 + (ANSWER_BYTES_MAX >> 16)), "more than 1048576 bytes"),
    ],
)
def test_other_services_are_an_error(
    stranger: Any, status: int, content: list[bytes], why: str
) -> None:
    stranger.status, stranger.content = status, content
    with EtcdCoordinator([f"{HOST}:{stranger.server_port}"], "job") as one:
        began = time.monotonic()
        with pytest.raises(ControllerLost) as caught:
            one.current(soon(0.5))
        assert time.monotonic() - began < 4
    assert why in caught.value.message


def test_an_answer_that_trickles_ends_at_the_deadline(stranger: Any) -> None:
    stranger.content, stranger.pause_s = [b" "] * 100, 0.1
    with EtcdCoordinator([f"{HOST}:{stranger.server_port}"], "job") as one:
        began = time.monotonic()
        with pytest.raises(ControllerLost):
            one.current(soon(0.5))
        assert time.monotonic() - began < 3


@pytest.mark.parametrize("forever", [b"X-Slow: 1\r\n", b"HTTP/1.1 100 Continue\r\n\r\n"])
def test_the_head_of_an_answer_ends_at_the_deadline_too(forever: bytes) -> None:
    with socket.create_server((HOST, 0)) as listener:

        def trickle() -> None:
            sock = listener.accept()[0]
            with sock, contextlib.suppress(OSError):
                sock.sendall(b"HTTP/1.1 200 OK\r\n" if forever[:1] == b"X" else forever)
                while True:
                    sock.sendall(forever)
                    time.sleep(0.05)

        thread = threading.Thread(target=trickle)
        thread.start()
        etcd = Etcd([f"{HOST}:{listener.getsockname()[1]}"])
        began = time.monotonic()
        with pytest.raises(ControllerLost):
            etcd.grant(1, soon(0.5))
        assert time.monotonic() - began < 3
        etcd.close()
        thread.join(timeout=30)


def test_an_error_instead_of_a_time_to_live_says_nothing_about_the_lease(stranger: Any) -> None:
    stranger.content = [b'{"error": {"grpc_code": 14, "message": "no leader"}}\n']
    etcd = Etcd([f"{HOST}:{stranger.server_port}"])
    with pytest.raises(ControllerLost):
        etcd.keep_alive(1, soon(0.4))
    etcd.close()


def test_a_watch_that_is_cut_off_ends_without_haste(stranger: Any) -> None:
    etcd = Etcd([f"{HOST}:{stranger.server_port}"])
    lines: list[list[bytes]] = [[], [b'{"result":{"canceled":true}}\n'], [b'{"error":{}}\n']]
    for stranger.content in lines:
        began = time.monotonic()
        assert etcd.await_change(b"k", 1, soon())
        assert 0.05 < time.monotonic() - began < 5
    etcd.close()


def test_a_connection_that_another_thread_closed_is_an_error_of_the_network() -> None:
    network = etcd_http._Network()
    network.until(soon(5), 5.0)
    with socket.create_server((HOST, 0)) as server:
        link = network.connect_tcp(*server.getsockname())
        link.close()
        with pytest.raises(httpcore.ReadError):
            link.read(10)
        with pytest.raises(httpcore.WriteError):
            link.write(b"1")
        assert link.get_extra_info("is_readable")
