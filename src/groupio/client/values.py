"""Items of the caller -> what the group is told about them, and where their bytes come from.

Nothing is copied here except plain values, which are encoded at the call: they may change right
after it. Arrays and tensors stay where they are until :mod:`.copying` reads them.
"""

from __future__ import annotations

import ctypes
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import translate
from typing import Any

import numpy as np
import numpy.typing as npt
from numpy.ma import MaskedArray

from groupio.client.arguments import check_patterns
from groupio.client.sources import Blob, Flat, Source, Strided, Tensor
from groupio.errors import InvalidInput
from groupio.format.codec import encode_plain
from groupio.format.dtypes import dtype_name, find_dtype
from groupio.model import ItemKind, ItemSpec

_PLAIN_TYPES = (type(None), bool, int, float, complex, str, list, tuple, dict, np.generic)


@dataclass(frozen=True, slots=True)
class Part:
    """A value that is this member's part of a larger one, or is declared a replica.

    ``value`` is an array, tensor, buffer or plain value; it lies at ``offsets`` in a tensor of
    ``global_shape`` (None: it is whole). ``origin`` None: as the type of the value says.
    """

    value: Any
    global_shape: tuple[int, ...] | None = None
    offsets: tuple[int, ...] | None = None
    replicated: bool = False
    origin: str | None = None


@dataclass(frozen=True, slots=True)
class Encoded:
    """A plain value that was encoded before, by :func:`groupio.format.codec.encode_plain`."""

    data: bytes


@dataclass(frozen=True, slots=True)
class Prepared:
    """Items ready to be saved: ``sources[i]`` gives the bytes of ``specs[i]``.

    A source is None where there is nothing to copy (the item is empty or an alias), and where
    ``pointers[i]`` is not 0: the bytes start at this address then. ``pointers`` None: all are 0.
    ``keep`` keeps that memory alive.
    """

    specs: tuple[ItemSpec, ...]
    sources: tuple[Source | None, ...]
    pointers: npt.NDArray[np.int64] | None = None
    keep: Sequence[object] = ()

    @property
    def bytes_logical(self) -> int:
        """The sum of the items' sizes."""
        return sum(spec.nbytes for spec in self.specs)


def prepare(
    items: Mapping[str, Any],
    replicated: Iterable[str] = (),
    earlier: Mapping[str, ItemSpec] | None = None,
) -> Prepared:
    """``items`` as specs and sources, in their order.

    Items that are the very same memory (tied tensors) become aliases of the first of them.
    ``earlier`` are specs of an earlier call by name: those that fit are used again. InvalidInput
    names the item, the type found and what to do when a value cannot be stored.
    """
    if not isinstance(items, Mapping):
        raise InvalidInput(
            f"items is of type {type(items).__name__}; give a mapping of names to values"
        )
    return _Preparer(replicated, earlier or {}).run(items)


def matcher(replicated: Iterable[str]) -> Callable[[str], bool]:
    """Whether a name is one of the names or matches one of the glob patterns ``replicated``."""
    given = check_patterns(replicated)
    if not given:
        return lambda name: False
    names = frozenset(given)
    matches = re.compile("|".join(map(translate, given))).match
    return lambda name: name in names or matches(name) is not None


class _Preparer:
    """Collects specs and sources, and finds items that share their memory.

    Written for 20,000 small tensors: little is done, and few objects are made, for each.
    """

    def __init__(self, replicated: Iterable[str], earlier: Mapping[str, ItemSpec]) -> None:
        declared = check_patterns(replicated)
        self._is_replicated = matcher(declared) if declared else None
        self._earlier = earlier
        torch = sys.modules.get("torch")
        self._tensor_type = getattr(torch, "Tensor", None)
        self._strided = getattr(torch, "strided", None)
        self._specs: list[ItemSpec] = []
        self._sources: list[Source | None] = []
        self._first_at: dict[int, int] = {}
        self._same: dict[tuple[object, ...], int] = {}
        self._dtype_names: dict[object, str] = {}
        self._zeros = [(0,) * ndim for ndim in range(8)]

    def run(self, items: Mapping[str, Any]) -> Prepared:
        for name, value in items.items():
            if type(name) is not str:
                raise InvalidInput(
                    f"the item name {name!r} is of type {type(name).__name__}; names are str"
                )
            self._add(name, value)
        return Prepared(tuple(self._specs), tuple(self._sources))

    def _add(self, name: str, given: Any) -> None:
        part = given if type(given) is Part else None
        value = given if part is None else part.value
        if self._tensor_type is not None and isinstance(value, self._tensor_type):
            self._add_tensor(name, value, part)
        elif isinstance(value, np.ndarray):
            self._add_array(name, value, part, "numpy")
        elif type(value) is bytes:
            self._append(name, ItemKind.BYTES, len(value), Blob(value), part, "buffer")
        elif isinstance(value, _PLAIN_TYPES):
            self._add_plain(name, value, part)
        elif type(value) is Encoded:
            data = value.data
            self._append(name, ItemKind.PLAIN, len(data), Blob(data), part, "plain")
        else:
            self._add_buffer(name, value, part)

    def _add_plain(self, name: str, value: Any, part: Part | None) -> None:
        data = encode_plain(value, name=f"item {name!r}")
        self._append(name, ItemKind.PLAIN, len(data), Blob(data), part, "plain")

    def _add_buffer(self, name: str, value: Any, part: Part | None) -> None:
        try:
            view = memoryview(value)
        except TypeError:
            self._add_plain(name, value, part)  # which says best what is wrong with it
            return
        try:
            array = np.asarray(view)
            if array.dtype.hasobject or array.dtype.names:
                raise ValueError(f"elements of format {view.format!r}")
        except (ValueError, TypeError, NotImplementedError) as error:
            raise InvalidInput(
                f"item {name!r} is a {type(value).__name__} that cannot be read as an array of "
                f"numbers ({error}); give its bytes"
            ) from None
        self._add_array(name, array, part, "buffer")

    def _add_array(
        self, name: str, array: np.ndarray[Any, Any], part: Part | None, origin: str
    ) -> None:
        if type(array) is not np.ndarray:
            if isinstance(array, MaskedArray):
                raise InvalidInput(
                    f"item {name!r} is a masked array; save its .data and .mask as two items"
                )
            array = np.asarray(array)
        dtype = array.dtype
        word = self._dtype_names.get(dtype)
        if word is None:
            if dtype.names is not None:
                # A name for the dtype would lose its fields; the plain codec keeps them.
                self._add_plain(name, array, part)
                return
            try:
                word = self._dtype_names[dtype] = dtype_name(dtype)
            except InvalidInput as error:
                raise InvalidInput(f"item {name!r}: {error.message}") from None
        nbytes = array.nbytes
        source: Source | None = None
        view: tuple[object, ...] | None = None
        pointer = 0
        if nbytes:
            pointer = _pointer(array)
            if array.flags.c_contiguous:
                source = Flat(pointer, array)
            else:
                source, view = Strided(array), array.strides
        self._append_tensor(name, word, array.shape, nbytes, pointer, view, source, part, origin)

    def _add_tensor(self, name: str, tensor: Any, part: Part | None) -> None:
        if tensor.layout is not self._strided or tensor.is_meta or hasattr(tensor, "_local_tensor"):
            raise _not_plain(name, tensor)
        dtype = tensor.dtype
        word = self._dtype_names.get(dtype)
        if word is None:
            word = self._dtype_names[dtype] = _torch_dtype_name(name, dtype)
        nbytes = tensor.nbytes
        source: Source | None = None
        view: tuple[object, ...] | None = None
        pointer = 0
        if nbytes:
            pointer = tensor.data_ptr()
            lazy = (tensor.is_conj(), tensor.is_neg())
            if tensor.is_cpu and lazy == (False, False) and tensor.is_contiguous():
                source = Flat(pointer, tensor)
            else:
                source = Tensor(tensor.detach())
                view = (*tensor.stride(), *lazy, str(tensor.device))
        shape = tuple(tensor.shape)
        self._append_tensor(name, word, shape, nbytes, pointer, view, source, part, "torch")

    def _append_tensor(
        self,
        name: str,
        dtype: str,
        shape: tuple[int, ...],
        nbytes: int,
        pointer: int,
        view: tuple[object, ...] | None,
        source: Source | None,
        part: Part | None,
        origin: str,
    ) -> None:
        replicated = self._is_replicated is not None and self._is_replicated(name)
        ndim = len(shape)
        global_shape, offsets = shape, self._zeros[ndim] if ndim < 8 else (0,) * ndim
        if part is not None:
            replicated = replicated or part.replicated
            origin = part.origin or origin
            if part.global_shape is not None:
                global_shape = tuple(part.global_shape)
                offsets = offsets if part.offsets is None else tuple(part.offsets)
        alias = -1
        if source is not None:
            here = len(self._specs)
            what = (dtype, shape, global_shape, offsets, replicated)
            alias = self._owner(pointer, view, what, here)
            if alias >= 0:
                source = None
        spec = self._earlier.get(name)
        if (
            spec is None
            or spec.shape != shape
            or spec.dtype != dtype
            or spec.nbytes != nbytes
            or spec.alias != alias
            or spec.replicated != replicated
            or spec.origin != origin
            or spec.global_shape != global_shape
            or spec.offsets != offsets
            or spec.kind is not ItemKind.TENSOR
        ):
            spec = ItemSpec(
                name,
                ItemKind.TENSOR,
                dtype,
                shape,
                global_shape,
                offsets,
                nbytes,
                replicated,
                origin,
                alias,
            )
        self._specs.append(spec)
        self._sources.append(source)

    def _owner(
        self, pointer: int, view: tuple[object, ...] | None, what: tuple[object, ...], here: int
    ) -> int:
        """The earlier item that is the very same values in the same memory, or -1.

        ``view`` tells apart views of memory that is not contiguous (None: it is).
        """
        if view is None:
            first = self._first_at.setdefault(pointer, here)
            if first == here:
                return -1
            spec = self._specs[first]
            known = (spec.dtype, spec.shape, spec.global_shape, spec.offsets, spec.replicated)
            self._same.setdefault((pointer, None, *known), first)
        owner = self._same.setdefault((pointer, view, *what), here)
        return -1 if owner == here else owner

    def _append(
        self, name: str, kind: ItemKind, nbytes: int, blob: Blob, part: Part | None, origin: str
    ) -> None:
        replicated = self._is_replicated is not None and self._is_replicated(name)
        if part is not None:
            replicated = replicated or part.replicated
            origin = part.origin or origin
        spec = ItemSpec(name, kind, "", (), (), (), nbytes, replicated, origin)
        earlier = self._earlier.get(name)
        self._specs.append(earlier if earlier == spec and earlier is not None else spec)
        self._sources.append(blob if nbytes else None)


def _pointer(array: np.ndarray[Any, Any]) -> int:
    """Where a non-empty array starts; by the quick way where the array lets itself be exported."""
    try:
        return ctypes.addressof(ctypes.c_char.from_buffer(array.data))
    except (TypeError, ValueError):
        pointer: int = array.__array_interface__["data"][0]
        return pointer


def _torch_dtype_name(name: str, dtype: Any) -> str:
    word = str(dtype).removeprefix("torch.")
    if find_dtype(word) is None:
        raise InvalidInput(
            f"item {name!r} has the dtype {dtype}, which has no portable counterpart; save "
            "`tensor.view(torch.uint8)` (or its dequantized values) instead"
        )
    return word


def _not_plain(name: str, tensor: Any) -> InvalidInput:
    """Why a tensor is more, or less, than strided memory."""
    if hasattr(tensor, "_local_tensor"):
        problem = "is a distributed tensor; save it through groupio.torch.save"
    elif tensor.is_meta:
        problem = "is on the meta device and has no data; materialize it first"
    else:
        problem = f"has the layout {tensor.layout}; save its indices and values as items"
    return InvalidInput(f"item {name!r} {problem}")
