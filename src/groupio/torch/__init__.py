"""State dicts of PyTorch, saved and loaded as a group.

::

    handle = groupio.torch.save({"model": model.state_dict(), "step": 3}, "/ckpt/run", step=3)
    handle.wait("durable")
    groupio.torch.load(state_dict, "/ckpt/run")          # the newest epoch, into state_dict

``GroupStorageWriter``, ``GroupStorageReader`` and ``GroupSavePlanner`` are for
``torch.distributed.checkpoint``: see :mod:`groupio.torch.dcp`.

Needs torch (``pip install 'groupio[torch]'``).
"""

from __future__ import annotations

from groupio.torch.clients import close
from groupio.torch.dcp import GroupSavePlanner, GroupStorageReader, GroupStorageWriter
from groupio.torch.foreground import foreground, foreground_hook
from groupio.torch.loading import load
from groupio.torch.pinned import install as _install_device_copies
from groupio.torch.report import LoadReport, SkippedEpoch
from groupio.torch.saving import save

_install_device_copies()

__all__ = [
    "GroupSavePlanner",
    "GroupStorageReader",
    "GroupStorageWriter",
    "LoadReport",
    "SkippedEpoch",
    "close",
    "foreground",
    "foreground_hook",
    "load",
    "save",
]
