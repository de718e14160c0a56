"""``python -m groupio.agent``: the agent process. Clients and ``groupio agent run`` start it."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import sys

import msgspec

import groupio
from groupio.agent import process
from groupio.agent.logs import set_up_log
from groupio.agent.memory import check_budget
from groupio.errors import GroupIOError
from groupio.settings import Settings

log = logging.getLogger("groupio.agent")


def main(arguments: list[str] | None = None) -> int:
    """Serve until idle, drained or stopped; 0 when the agent ended as it should."""
    parser = argparse.ArgumentParser(prog="python -m groupio.agent")
    parser.add_argument("--runtime-dir")
    parser.add_argument("--ready-fd", type=int)
    parser.add_argument("--settings", default="{}")
    parser.add_argument("--foreground", action="store_true")
    options = parser.parse_args(arguments)
    signal_ready = process.ReadySignal(options.ready_fd) if options.ready_fd is not None else None
    try:
        settings = msgspec.json.decode(options.settings, type=Settings)
        paths = process.runtime_paths(
            options.runtime_dir or settings.runtime_dir, groupio.__version__
        )
        check_budget(settings.memory_bytes)
        process.make_runtime_dir(paths)
        if not options.foreground:
            process.detach()
        set_up_log(paths.log, settings.log_level, capture_stdio=not options.foreground)
        process.raise_fd_limit()
        if not options.foreground:
            before, now = process.take_all_processors()
            if now != before:
                log.info("running on %d processors; its starter was bound to %d", now, before)
        residence = process.Residence.take(paths)
    except (GroupIOError, OSError, msgspec.MsgspecError) as error:
        if signal_ready is not None:
            signal_ready.failed(str(error))
        print(f"groupio agent: {error}", file=sys.stderr)
        return 2
    try:
        asyncio.run(_serve(settings, residence, signal_ready))
    except Exception as error:
        log.critical("the agent ended with an error", exc_info=True)
        if signal_ready is not None and not signal_ready.is_used:
            signal_ready.failed(str(error) or type(error).__name__)
        return 1
    finally:
        residence.close()
    return 0


async def _serve(
    settings: Settings, residence: process.Residence, ready: process.ReadySignal | None
) -> None:
    # Imported here: a starter that waits for an answer should get bad settings first.
    from groupio.agent.driver import Driver

    driver = Driver(settings, residence)
    loop = asyncio.get_running_loop()

    def stop() -> None:
        if driver.draining:
            # The store may hang, and threads in it cannot be ended: do not wait for them.
            log.warning("a second signal: the agent ends at once, what is not durable is lost")
            logging.shutdown()
            os._exit(1)
        driver.do(lambda: driver.drain(abort_unstaged=True))

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)

    def on_ready() -> None:
        if ready is not None:
            ready.ready()

    await driver.run(on_ready)


if __name__ == "__main__":
    sys.exit(main())
