"""Memory for the items of a load: new arrays, or the caller's own buffers.

Everything is checked before the first byte is read, so that a wrong buffer is an error and not
half a load.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np

from groupio.errors import InvalidInput
from groupio.format.codec import decode_plain
from groupio.format.dtypes import dtype_from_name
from groupio.model import ItemKind, ItemSpec


class Destination(Protocol):
    """Where one item goes. ``view`` are its bytes, as one flat writable range."""

    @property
    def view(self) -> memoryview:
        """As many bytes as the item has."""
        ...

    def finish(self) -> Any:
        """The value to return, once all bytes of ``view`` are there and verified."""
        ...


class _Array:
    """A new numpy array that owns its memory."""

    __slots__ = ("array", "view")

    def __init__(self, spec: ItemSpec) -> None:
        self.array = np.empty(spec.shape, dtype_from_name(spec.dtype))
        self.view = _bytes_of(self.array)

    def finish(self) -> Any:
        """See :class:`Destination`."""
        return self.array


class _Bytes:
    """New memory, given out as bytes or decoded."""

    __slots__ = ("data", "plain", "view")

    def __init__(self, spec: ItemSpec) -> None:
        self.data = bytearray(spec.nbytes)
        self.view = memoryview(self.data)
        self.plain = spec.kind is ItemKind.PLAIN

    def finish(self) -> Any:
        """See :class:`Destination`."""
        return decode_plain(self.data) if self.plain else bytes(self.data)


class _Given:
    """A caller's buffer, filled directly."""

    __slots__ = ("given", "view")

    def __init__(self, given: Any, view: memoryview) -> None:
        self.given = given
        self.view = view

    def finish(self) -> Any:
        """See :class:`Destination`."""
        return self.given


class _Through:
    """A caller's array or tensor that is not contiguous here: filled through a temporary."""

    __slots__ = ("given", "target", "temporary", "view")

    def __init__(self, given: Any, target: Any, temporary: Any, view: memoryview) -> None:
        self.given = given
        self.target = target
        self.temporary = temporary
        self.view = view

    def finish(self) -> Any:
        """See :class:`Destination`."""
        self.target[...] = self.temporary
        return self.given


def new_destination(spec: ItemSpec) -> Destination:
    """New memory for an item."""
    return _Array(spec) if spec.kind is ItemKind.TENSOR else _Bytes(spec)


def given_destination(spec: ItemSpec, given: Any) -> Destination:
    """The caller's ``given`` for an item: an array, tensor or buffer of its size and dtype.

    InvalidInput when it does not fit or cannot be written.
    """
    if spec.kind is ItemKind.PLAIN:
        raise InvalidInput(
            f"item {spec.name!r} is a plain value and cannot be read into a buffer; leave it out "
            "of `into` and take it from the result"
        )
    tensor_type = getattr(sys.modules.get("torch"), "Tensor", None)
    if tensor_type is not None and isinstance(given, tensor_type):
        return _into_tensor(spec, given)
    if isinstance(given, np.ndarray):
        return _into_array(spec, given)
    return _into_buffer(spec, given)


def _into_array(spec: ItemSpec, given: np.ndarray[Any, Any]) -> Destination:
    # Raw bytes have no dtype of their own: any array of their size takes them.
    if spec.kind is ItemKind.TENSOR:
        _check_dtype(spec, given.dtype == dtype_from_name(spec.dtype), given.dtype)
    _check_size(spec, given.nbytes)
    if not given.flags.writeable:
        raise InvalidInput(f"the array given for item {spec.name!r} is read-only")
    if given.flags.c_contiguous:
        return _Given(given, _bytes_of(given))
    temporary = np.empty(given.shape, given.dtype)
    return _Through(given, given, temporary, _bytes_of(temporary))


def _into_buffer(spec: ItemSpec, given: Any) -> Destination:
    try:
        view = memoryview(given)
    except TypeError:
        raise InvalidInput(
            f"what is given for item {spec.name!r} is of type {type(given).__name__}; give a "
            "writable buffer, a numpy array or a torch tensor"
        ) from None
    if view.readonly:
        raise InvalidInput(f"the buffer given for item {spec.name!r} is read-only")
    if not view.c_contiguous:
        return _into_array(spec, np.asarray(view))
    _check_size(spec, view.nbytes)
    flat = view.cast("B") if view.nbytes else memoryview(bytearray())
    return _Given(given, flat)


def _into_tensor(spec: ItemSpec, given: Any) -> Destination:
    if spec.kind is ItemKind.TENSOR:
        word = str(given.dtype).removeprefix("torch.")
        _check_dtype(spec, word == spec.dtype, given.dtype)
    nbytes = given.numel() * given.element_size()
    _check_size(spec, nbytes)
    if hasattr(given, "_local_tensor") or str(given.layout) != "torch.strided":
        raise InvalidInput(
            f"the tensor given for item {spec.name!r} is not plain strided memory; load "
            "distributed tensors through groupio.torch.load"
        )
    target = given.detach()
    direct = given.device.type == "cpu" and given.is_contiguous()
    if direct and not given.is_conj() and not given.is_neg():
        return _Given(given, _memory(given.data_ptr(), nbytes))
    torch = sys.modules["torch"]
    temporary = torch.empty(tuple(given.shape), dtype=given.dtype, device="cpu")
    return _Through(given, target, temporary, _memory(temporary.data_ptr(), nbytes))


def _check_dtype(spec: ItemSpec, same: bool, found: object) -> None:
    if not same:
        raise InvalidInput(
            f"item {spec.name!r} has the dtype {spec.dtype}, what is given for it has {found}"
        )


def _check_size(spec: ItemSpec, nbytes: int) -> None:
    if nbytes != spec.nbytes:
        raise InvalidInput(
            f"item {spec.name!r} has {spec.nbytes} bytes (shape {spec.shape}), what is given for "
            f"it has {nbytes}"
        )


def _bytes_of(array: np.ndarray[Any, Any]) -> memoryview:
    if not array.nbytes:
        return memoryview(bytearray())
    return array.reshape(-1).view(np.uint8).data


def _memory(pointer: int, nbytes: int) -> memoryview:
    """Memory of a tensor, which the destination keeps alive."""
    if not nbytes:
        return memoryview(bytearray())
    return memoryview((ctypes.c_char * nbytes).from_address(pointer)).cast("B")


def destinations(
    specs: Mapping[str, ItemSpec], into: Mapping[str, Any] | None
) -> dict[str, Destination]:
    """A destination for each of ``specs``: from ``into`` where it has the name, else new memory.

    InvalidInput when something in ``into`` does not fit.
    """
    given = {} if into is None else into
    made = {name: given_destination(specs[name], given[name]) for name in given if name in specs}
    return {
        name: made[name] if name in made else new_destination(spec) for name, spec in specs.items()
    }
