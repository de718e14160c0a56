"""What the end-to-end tests save, and saving it on all ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

MIB = 1 << 20


def data(seed: int, size: int = 9 * MIB + 5) -> dict[str, Any]:
    return {"weights": {"seed": seed, "bytes": size}, "step": seed, "config": {"lr": 0.1}}


def save_all(ranks: list[Any], epoch: int, seed: Callable[[int], int], **more: Any) -> None:
    for one in ranks:
        one.send("save", epoch=epoch, items=data(seed(one.rank)), **more)
    for one in ranks:
        answer = one.answer()
        assert answer["error"] is None, answer
    for one in ranks:
        times = one.ask("wait", epoch=epoch, timeout_s=60)["times"]
        assert times["released"] <= times["staged"] <= times["durable"]
        assert times["remote"] is not None
