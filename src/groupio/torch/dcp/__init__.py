"""Classes for ``torch.distributed.checkpoint``.

::

    writer = GroupStorageWriter("/ckpt/run")
    dcp.save(state_dict, checkpoint_id="step-1000", storage_writer=writer,
             planner=GroupSavePlanner())
    dcp.load(state_dict, checkpoint_id="step-1000",
             storage_reader=GroupStorageReader("/ckpt/run"))
"""

from __future__ import annotations

from groupio.torch.dcp.planner import GroupSavePlanner
from groupio.torch.dcp.reader import GroupStorageReader
from groupio.torch.dcp.writer import GroupStorageWriter

__all__ = ["GroupSavePlanner", "GroupStorageReader", "GroupStorageWriter"]
