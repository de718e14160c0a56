"""A rank as a process of its own: reads one JSON command a line, answers with one JSON line.

Arrays are described, not sent: ``{"seed": 3, "bytes": 1048576}`` is that many random bytes.
``{"zeros": 1048576}`` is that many zeros, which are made in no time. ``"flip": 5`` changes a bit
of byte 5.
"""

from __future__ import annotations

import ctypes
import faulthandler
import functools
import gc
import json
import os
import sys
import time
from collections import Counter, deque
from typing import Any

import numpy as np

import groupio
from groupio.client import saving
from groupio.errors import AgentLost, GroupIOError, to_wire

client: groupio.Client | None = None
handles: dict[int, groupio.SaveHandle] = {}
made: dict[str, dict[str, Any]] = {}
"""Items of saves to come, by name."""


faulthandler.enable()


def value(spec: Any) -> Any:
    if isinstance(spec, dict) and "seed" in spec:
        made = np.random.default_rng(spec["seed"]).integers(0, 256, spec["bytes"], dtype=np.uint8)
        if "flip" in spec:
            made[spec["flip"]] ^= 1
        return made
    if isinstance(spec, dict) and "zeros" in spec:
        return np.zeros(spec["zeros"], np.uint8)
    return spec


def items_of(spec: dict[str, Any]) -> dict[str, Any]:
    many = spec.pop("__many__", None)
    items = {name: value(one) for name, one in spec.items()}
    if many is not None:
        shared = np.arange(16, dtype=np.float32)
        items |= {f"layer.{i}.weight": shared + i for i in range(many)}
    return items


def hold_copies(folder: str) -> None:
    """From now on, copies wait as long as the file ``copy`` is in ``folder``."""
    real = saving.copy_range

    def copy_range(*args: Any) -> bool:
        if os.path.exists(f"{folder}/copy"):
            open(f"{folder}/copy.reached", "w").close()
        while os.path.exists(f"{folder}/copy"):
            time.sleep(0.005)
        return real(*args)

    saving.copy_range = copy_range


def times(handle: groupio.SaveHandle) -> dict[str, Any]:
    t = handle.times
    return {
        name: getattr(t, name) for name in ("released", "staged", "replicated", "remote", "durable")
    }


def cycles(
    store: str, count: int, first: int, save: bool = False, stores: int = 1, **connect: Any
) -> dict[str, Any]:
    """Connect and close so often, one client after the other, with a save and now and then a load
    in between; ``stores`` are taken in turn."""
    for number in range(first, first + count):
        path = f"{store}{number % stores}"
        with groupio.connect(path, **connect) as one:
            if save:
                handle = one.save({"x": number, "y": b"y" * 5000}, epoch=number)
                handle.wait("durable", timeout_s=60)
                if number % 10 == 0:
                    assert one.load()["x"] == number
                    assert one.epochs()[-1].epoch == number
    return {}


def held() -> dict[str, int]:
    """How many objects of groupio's types live, and how long what its modules keep is."""
    gc.collect()
    kinds = Counter(f"{type(one).__module__}.{type(one).__qualname__}" for one in gc.get_objects())
    found = {kind: count for kind, count in kinds.items() if kind.startswith("groupio.")}
    for name, module in list(sys.modules.items()):
        for key, kept in vars(module).items() if name.startswith("groupio.") else ():
            if isinstance(kept, functools._lru_cache_wrapper):
                found[f"{name}.{key}"] = kept.cache_info().currsize
            elif isinstance(kept, (dict, list, set, deque)) and not key.startswith("__"):
                found[f"{name}.{key}"] = len(kept)
    return found


class _Mallinfo(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


def in_use() -> dict[str, int]:
    """Objects of Python, and KiB of malloc: without what both allocators keep free for later."""
    gc.collect()
    mallinfo2 = ctypes.CDLL(None).mallinfo2
    mallinfo2.restype = _Mallinfo
    found = mallinfo2()
    return {
        "blocks": sys.getallocatedblocks(),
        "used_kib": (found.uordblks + found.hblkhd) >> 10,
        "free_kib": found.fordblks >> 10,
    }


def run(command: dict[str, Any]) -> dict[str, Any]:
    global client
    what = command.pop("do")
    match what:
        case "connect":
            client = groupio.connect(**command)
            return {}
        case "save":
            assert client is not None
            spec = command.pop("items")
            items = made.pop(spec) if isinstance(spec, str) else items_of(spec)
            handle = client.save(items, **command)
            handles[command["epoch"]] = handle
            for array in items.values():
                if isinstance(array, np.ndarray) and array.flags.writeable:
                    array.fill(0)  # what was saved are the bytes at the call
            error = handle.error
            return {"error": to_wire(error) if error else None, "times": times(handle)}
        case "make":
            made[command["name"]] = items_of(command["items"])
            return {}
        case "hold_copies":
            hold_copies(command["folder"])
            return {}
        case "wait":
            handle = handles[command.pop("epoch")]
            catch = command.pop("catch", False)
            try:
                handle.wait(**command)
            except AgentLost as error:
                if not catch:
                    raise
                return {"lost": to_wire(error)}
            return {"times": times(handle), "notes": list(handle.times.notes)}
        case "load":
            assert client is not None
            expect = items_of(command.pop("expect"))
            started = time.monotonic()
            got = client.load(**command)
            assert set(got) == set(expect), sorted(set(got) ^ set(expect))[:5]
            for name, one in expect.items():
                if isinstance(one, np.ndarray):
                    assert got[name].dtype == one.dtype, name
                    assert got[name].tobytes() == one.tobytes(), f"{name} differs"
                else:
                    assert got[name] == one, name
            return {"seconds": time.monotonic() - started, "skipped": client.skipped_epochs}
        case "epochs":
            assert client is not None
            return {"epochs": [e.epoch for e in client.epochs()]}
        case "close":
            assert client is not None
            client.close()
            return {}
        case "cycles":
            return cycles(**command)
        case "held":
            return held()
        case "in_use":
            return in_use()
        case "fds":
            return {"fds": len(os.listdir("/proc/self/fd"))}
    raise AssertionError(what)


def main() -> None:
    for line in sys.stdin:
        try:
            answer = run(json.loads(line))
        except GroupIOError as error:
            answer = {"raised": to_wire(error)}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
