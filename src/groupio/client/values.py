"""Items of the caller -> what the group is told about them, and where their bytes come from.

Nothing is copied here except plain values, which are encoded at the call: they may change right
after it. Arrays and tensors stay where they are until :mod:`.copying` reads them.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import translate
from typing import Any

import numpy as np

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
class Prepared:
    """Items ready to be saved: ``sources[i]`` gives the bytes of ``specs[i]``.

    A source is None where there is nothing to copy: the item is empty or an alias.
    """

    specs: tuple[ItemSpec, ...]
    sources: tuple[Source | None, ...]

    @property
    def bytes_logical(self) -> int:
        """The sum of the items' sizes."""
        return sum(spec.nbytes for spec in self.specs)


def prepare(items: Mapping[str, Any], replicated: Iterable[str] = ()) -> Prepared:
    """``items`` as specs and sources, in their order.

    Items that are the very same memory (tied tensors) become aliases of the first of them.
    InvalidInput names the item, the type found and what to do when a value cannot be stored.
    """
    if not isinstance(items, Mapping):
        raise InvalidInput(
            f"items is of type {type(items).__name__}; give a mapping of names to values"
        )
    return _Preparer(matcher(replicated)).run(items)


def matcher(replicated: Iterable[str]) -> Callable[[str], bool]:
    """Whether a name is one of the names or matches one of the glob patterns ``replicated``."""
    given = check_patterns(replicated)
    if not given:
        return lambda name: False
    names = frozenset(given)
    matches = re.compile("|".join(map(translate, given))).match
    return lambda name: name in names or matches(name) is not None


class _Preparer:
    """Collects specs and sources, and finds items that share their memory."""

    def __init__(self, is_replicated: Callable[[str], bool]) -> None:
        self._is_replicated = is_replicated
        self._torch = getattr(sys.modules.get("torch"), "Tensor", None)
        self._specs: list[ItemSpec] = []
        self._sources: list[Source | None] = []
        self._owners: dict[tuple[object, ...], int] = {}
        self._dtype_names: dict[object, str] = {}

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
        if self._torch is not None and isinstance(value, self._torch):
            self._add_tensor(name, value, part)
        elif isinstance(value, np.ndarray):
            self._add_array(name, value, part, "numpy")
        elif type(value) is bytes:
            self._append(name, ItemKind.BYTES, len(value), Blob(value), part, "buffer")
        elif isinstance(value, _PLAIN_TYPES):
            self._add_plain(name, value, part)
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
        if isinstance(array, np.ma.MaskedArray):
            raise InvalidInput(
                f"item {name!r} is a masked array; save its .data and .mask as two items"
            )
        array = np.asarray(array)
        dtype = array.dtype
        if dtype.names is not None:
            # The name of a structured dtype would lose its fields; the plain codec keeps them.
            self._add_plain(name, array, part)
            return
        word = self._dtype_names.get(dtype)
        if word is None:
            try:
                word = self._dtype_names[dtype] = dtype_name(dtype)
            except InvalidInput as error:
                raise InvalidInput(f"item {name!r}: {error.message}") from None
        pointer: int = array.__array_interface__["data"][0]
        source = Flat(pointer, array) if array.flags.c_contiguous else Strided(array)
        self._append_tensor(
            name, word, array.shape, array.nbytes, pointer, array.strides, source, part, origin
        )

    def _add_tensor(self, name: str, tensor: Any, part: Part | None) -> None:
        word = self._dtype_names.get(tensor.dtype)
        if word is None:
            word = self._dtype_names[tensor.dtype] = _torch_dtype_name(name, tensor.dtype)
        _check_tensor(name, tensor)
        shape = tuple(tensor.shape)
        nbytes = tensor.numel() * tensor.element_size()
        source: Source
        if tensor.device.type != "cpu":
            pointer, source = 0, Tensor(tensor.detach())
        elif tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
            pointer = tensor.data_ptr()
            source = Flat(pointer, tensor)
        else:
            pointer, source = 0, Tensor(tensor.detach())
        self._append_tensor(name, word, shape, nbytes, pointer, None, source, part, "torch")

    def _append_tensor(
        self,
        name: str,
        dtype: str,
        shape: tuple[int, ...],
        nbytes: int,
        pointer: int,
        strides: tuple[int, ...] | None,
        source: Source,
        part: Part | None,
        origin: str,
    ) -> None:
        replicated = self._is_replicated(name)
        global_shape, offsets = shape, (0,) * len(shape)
        if part is not None:
            replicated = replicated or part.replicated
            origin = part.origin or origin
            if part.global_shape is not None:
                global_shape = tuple(part.global_shape)
                offsets = offsets if part.offsets is None else tuple(part.offsets)
        alias = -1
        kept: Source | None = source if nbytes else None
        if pointer and nbytes:
            key = (pointer, dtype, shape, strides, global_shape, offsets, replicated)
            owner = self._owners.setdefault(key, len(self._specs))
            if owner != len(self._specs):
                alias, kept = owner, None
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
        self._sources.append(kept)

    def _append(
        self, name: str, kind: ItemKind, nbytes: int, blob: Blob, part: Part | None, origin: str
    ) -> None:
        replicated = self._is_replicated(name) or (part is not None and part.replicated)
        if part is not None:
            origin = part.origin or origin
        self._specs.append(ItemSpec(name, kind, "", (), (), (), nbytes, replicated, origin))
        self._sources.append(blob if nbytes else None)


def _torch_dtype_name(name: str, dtype: Any) -> str:
    word = str(dtype).removeprefix("torch.")
    if find_dtype(word) is None:
        raise InvalidInput(
            f"item {name!r} has the dtype {dtype}, which has no portable counterpart; save "
            "`tensor.view(torch.uint8)` (or its dequantized values) instead"
        )
    return word


def _check_tensor(name: str, tensor: Any) -> None:
    """InvalidInput for tensors that are more, or less, than strided memory."""
    if hasattr(tensor, "_local_tensor"):
        problem = "is a distributed tensor; save it through groupio.torch.save"
    elif str(tensor.layout) != "torch.strided":
        problem = f"has the layout {tensor.layout}; save its indices and values as items"
    elif tensor.device.type == "meta":
        problem = "is on the meta device and has no data; materialize it first"
    else:
        return
    raise InvalidInput(f"item {name!r} {problem}")
