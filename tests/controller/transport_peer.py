"""A process with one end of a control link, for tests that pause and kill it.

``transport_peer.py dial ADDRESS`` or ``transport_peer.py listen``, which prints its address.
"""

from __future__ import annotations

import asyncio
import sys

from transport_tools import KEYS, PATIENT

from groupio.controller.transport import ControlClient, ControlServer


async def main() -> None:
    loop = asyncio.get_running_loop()
    if sys.argv[1] == "dial":
        end = ControlClient(loop, sys.argv[2], KEYS, life="c" * 32, config=PATIENT)
    else:
        end = ControlServer(loop, "tcp://127.0.0.1:0", KEYS, print, life="d" * 32, config=PATIENT)
    print(end.address, flush=True)
    await asyncio.sleep(60)


if __name__ == "__main__":
    asyncio.run(main())
