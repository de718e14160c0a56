"""The copy of ``dcp.async_save``, made by the training thread straight into the arena.

DCP calls ``stage`` before anybody has said which checkpoint it is; then it starts the thread that
saves, which names it (``reset``), and calls ``synchronize_staging`` in the training thread. There
the copy is made: the training thread waits for the name, a moment, and the thread that saves waits
for the copy before it plans.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, ItemsView, Iterator, Mapping
from typing import Any

from torch.distributed.checkpoint._nested_dict import flatten_state_dict, unflatten_state_dict
from torch.distributed.checkpoint._sharded_tensor_utils import _flatten_sharded_tensors

from groupio.client.handle import SaveHandle
from groupio.errors import GroupAborted, GroupIOError, InvalidInput
from groupio.format.structure import Branch
from groupio.torch.dcp.items import state_items
from groupio.torch.flatten import dcp_tree

NAME_S = 60.0
"""DCP's thread has to name the checkpoint within this time, in seconds."""

COPY_MARGIN_S = 60.0
"""The thread that saves waits so much longer for the copy than a save may take."""


class Lazy(Mapping[str, Any]):
    """Items that are made when the client asks for them.

    So an InvalidInput arises inside of the client's ``save``, which tells the other members.
    """

    def __init__(self, make: Callable[[], dict[str, Any]]) -> None:
        self._make = make
        self._made: dict[str, Any] | None = None

    def _items(self) -> dict[str, Any]:
        if self._made is None:
            self._made = self._make()
        return self._made

    def __getitem__(self, name: str) -> Any:
        return self._items()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items())

    def __len__(self) -> int:
        return len(self._items())

    def items(self) -> ItemsView[str, Any]:
        """All of them."""
        return self._items().items()


class Staging:
    """One state dict between ``stage`` and the end of its copy. ``names`` are those handed over."""

    def __init__(self, state_dict: dict[str, Any], preset: str | None) -> None:
        self.thread = threading.get_ident()
        self.preset = preset
        self.names: frozenset[str] = frozenset()
        self.handle: SaveHandle | None = None
        self.error: GroupIOError | None = None
        self.skeleton = state_dict
        self._epoch: int | None = None
        self._flat: dict[str, Any] | None = None
        self._mappings: dict[str, Any] = {}
        self._tree: Branch | None = None
        self._problem: InvalidInput | None = None
        self._named = threading.Event()
        self._copied = threading.Event()
        try:
            self._flatten(state_dict)
        except InvalidInput as error:
            # DCP would fail to flatten it too, before it asks what is wrong.
            self._problem, self.skeleton = error, {}
        except Exception as error:  # noqa: BLE001  raised here the other ranks would wait
            self._problem = InvalidInput(f"the state dict cannot be flattened: {error}")

    def _flatten(self, state_dict: dict[str, Any]) -> None:
        self._tree = dcp_tree(state_dict)
        flat, self._mappings = flatten_state_dict(state_dict)
        # The thread that saves sees these containers: those of the caller may change.
        self.skeleton = unflatten_state_dict(flat, self._mappings)
        if any(hasattr(value, "local_shards") for value in flat.values()):
            flat = _flatten_sharded_tensors(flat)
        self._flat = flat
        self.names = frozenset(flat)

    # -- the thread that saves -------------------------------------------------------------------

    def name(self, epoch: int) -> None:
        """Say which epoch it is."""
        self._epoch = epoch
        self._named.set()

    def refuse(self, error: GroupIOError) -> None:
        """There will be no save."""
        self.error = self.error or error
        self._named.set()

    def wait_copied(self, deadline_s: float) -> None:
        """Wait until the state dict may change; ``error`` or ``handle`` is set then."""
        if not self._copied.wait(deadline_s + COPY_MARGIN_S):
            self.error = self.error or GroupAborted(
                "the copy of the state dict did not end in time: this version of "
                "torch.distributed.checkpoint does not call synchronize_staging, or its thread "
                "hangs; see its stack"
            )

    # -- the training thread ---------------------------------------------------------------------

    def copy(self, save: Callable[[Mapping[str, Any], int], SaveHandle]) -> None:
        """Hand everything over to ``save``; returns when the state dict may change.

        Never raises an error.
        """
        try:
            if not self._named.wait(NAME_S):
                raise GroupAborted(
                    f"the thread of dcp.async_save did not begin within {NAME_S:.0f} s; the node "
                    "is overloaded or an earlier save hangs"
                )
            if self.error is None:
                assert self._epoch is not None
                self.handle = save(Lazy(self._items), self._epoch)
        except GroupIOError as error:
            self.error = self.error or error
        except Exception as error:  # noqa: BLE001  it is told by the thread that saves
            failed = GroupAborted(f"the state dict was not copied: {type(error).__name__}: {error}")
            failed.__cause__ = error
            self.error = self.error or failed
        except BaseException:
            self.error = self.error or GroupAborted("the copy of the state dict was interrupted")
            raise
        finally:
            self._flat = None
            self._copied.set()

    def _items(self) -> dict[str, Any]:
        if self._problem is not None:
            raise self._problem
        assert self._flat is not None
        return state_items(self._flat, self._mappings, self._tree)
