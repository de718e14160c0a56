"""Marks the moments in which a training job communicates, so that storage gives way in them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from groupio.torch.clients import open_clients

Hook = Callable[[Any, Any], "torch.futures.Future[torch.Tensor]"]
"""A communication hook of DistributedDataParallel."""


@contextmanager
def foreground(share: float | None = None) -> Iterator[None]:
    """As :meth:`groupio.Client.foreground`, for all stores that this process saves to.

    A context manager, and a decorator for functions. Without an earlier save or load it does
    nothing: there is no traffic yet.
    """
    with ExitStack() as stack:
        for client in open_clients():
            stack.enter_context(client.foreground(share))
        yield


def foreground_hook(hook: Hook, share: float | None = None) -> Hook:
    """``hook`` of DistributedDataParallel, whose communication is marked as foreground.

    ::

        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

        model.register_comm_hook(None, groupio.torch.foreground_hook(allreduce_hook))

    An interval lasts from the call of ``hook`` until its future is done. With an accelerator that
    is when the work is queued, not when the device has done it: there, put a
    :func:`foreground` around a part of the step that waits for the device.
    """

    @functools.wraps(hook)  # torch looks at its annotations
    def marked(state: Any, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        interval = ExitStack()
        interval.enter_context(foreground(share))
        try:
            future = hook(state, bucket)
        except BaseException:
            interval.close()
            raise
        future.add_done_callback(lambda _: interval.close())
        return future

    return marked
