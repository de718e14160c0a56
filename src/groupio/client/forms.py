"""The same form again: a job's saves have the names, types and shapes of the one before.

The tensors of such a save are compared with that form column by column, about 1 us for each, and
nothing is made for them but a list of their addresses.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Any

import numpy as np
import numpy.typing as npt

from groupio.client.sources import Flat, Source
from groupio.client.values import Prepared, prepare
from groupio.model import ItemSpec

GATHERED_BYTES_MAX = 1024
"""Tensors up to this size are copied many by one call (:func:`.copying.copy_range`)."""


@dataclass(frozen=True, slots=True)
class Form:
    """What a save of the same form has in common with the one that this was made of.

    ``is_direct[i]`` says that item i is a plain tensor in one stretch of the memory of the
    process; ``dtypes``, ``shapes``, ``nbytes``, ``ties`` and ``is_own`` (it is no alias) have an
    entry for each of those. ``rest`` are the numbers of the other items. Holds no tensor of the
    caller.
    """

    specs: tuple[ItemSpec, ...]
    declared: tuple[str, ...]
    names: list[str]
    types: list[type]
    is_direct: list[bool]
    dtypes: list[Any]
    shapes: list[tuple[int, ...]]
    nbytes: npt.NDArray[np.int64]
    ties: npt.NDArray[np.int64]
    is_own: npt.NDArray[np.bool_]
    rest: list[int]

    @classmethod
    def of(
        cls, items: Mapping[str, Any], prepared: Prepared, declared: tuple[str, ...]
    ) -> Form | None:
        """The form of ``items``; None when no later save could be compared with it quickly.

        That is so when an item that is not direct shares its memory with another one.
        """
        values = list(items.values())
        types = [type(value) for value in values]
        plain = _plain_types()
        is_direct = [kind in plain for kind in types]
        answers = iter(_are_direct(list(compress(values, is_direct))))
        is_direct = [tensor and next(answers) for tensor in is_direct]
        tensors = list(compress(values, is_direct))
        specs = prepared.specs
        rest = np.flatnonzero(np.logical_not(is_direct)).tolist()
        nbytes = np.array([spec.nbytes for spec in compress(specs, is_direct)], np.int64)
        found = _addresses(tensors, nbytes)
        others = [prepared.sources[i] for i in rest]
        aliases = any(specs[i].alias >= 0 for i in rest)
        if found is None or aliases or _share_memory(found, others):
            return None
        return cls(
            specs,
            declared,
            list(items),
            types,
            is_direct,
            [tensor.dtype for tensor in tensors],
            [tuple(tensor.shape) for tensor in tensors],
            nbytes,
            _ties(found),
            np.array([spec.alias < 0 for spec in compress(specs, is_direct)], np.bool_),
            rest,
        )

    def prepare(self, items: Mapping[str, Any], declared: tuple[str, ...]) -> Prepared | None:
        """What :func:`.values.prepare` gives for ``items``; None unless they have this form.

        InvalidInput when one of them cannot be stored.
        """
        if declared != self.declared or list(items) != self.names:
            return None
        values = list(items.values())
        if list(map(type, values)) != self.types:
            return None
        tensors = list(compress(values, self.is_direct))
        if (
            not all(_are_direct(tensors))
            or [tensor.dtype for tensor in tensors] != self.dtypes
            # One by one: 20,000 new tuples would make the garbage collector look at everything.
            or not all(
                tensor.shape == shape for tensor, shape in zip(tensors, self.shapes, strict=True)
            )
        ):
            return None
        found = _addresses(tensors, self.nbytes)
        if found is None or not np.array_equal(_ties(found), self.ties):
            return None
        names, specs = self.names, self.specs
        known = {names[i]: specs[i] for i in self.rest}
        others = prepare({names[i]: values[i] for i in self.rest}, declared, known)
        if _share_memory(found, others.sources):
            return None
        sources: list[Source | None] = [None] * len(values)
        for i, spec, source in zip(self.rest, others.specs, others.sources, strict=True):
            if spec != specs[i]:
                return None
            sources[i] = source
        pointers = np.zeros(len(values), np.int64)
        direct = np.flatnonzero(self.is_direct)
        small = self.is_own & (self.nbytes <= GATHERED_BYTES_MAX)
        pointers[direct[small]] = found[small]
        for row in np.flatnonzero(self.is_own & ~small).tolist():
            sources[direct[row]] = Flat(int(found[row]), tensors[row])
        return Prepared(specs, tuple(sources), pointers, tensors)


def _plain_types() -> tuple[type, ...]:
    torch = sys.modules.get("torch")
    return () if torch is None else (torch.Tensor, torch.nn.Parameter)


def _are_direct(tensors: Sequence[Any]) -> list[bool]:
    """Whether the elements of each tensor are one stretch of this process' memory, as they are."""
    if not tensors:
        return []
    strided = sys.modules["torch"].strided
    return [
        tensor.is_cpu
        and tensor.layout is strided
        and not tensor.is_nested
        and tensor.is_contiguous()
        and not tensor.is_neg()
        and not tensor.is_conj()
        for tensor in tensors
    ]


def _addresses(
    tensors: Sequence[Any], nbytes: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64] | None:
    """Where the tensors start, int64[n], 0 for empty ones; None when one has no memory."""
    found = np.array([tensor.data_ptr() for tensor in tensors], np.int64)
    found[nbytes == 0] = 0
    return None if ((found == 0) & (nbytes > 0)).any() else found


def _ties(addresses: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """For each address the first row that has it; empty tensors share nothing."""
    rows = np.arange(len(addresses))
    order = np.argsort(addresses, kind="stable")
    ascending = addresses[order]
    starts = np.ones(len(order), np.bool_)
    starts[1:] = (ascending[1:] != ascending[:-1]) | (ascending[1:] == 0)
    rows[order] = order[starts][np.cumsum(starts) - 1]
    return rows


def _share_memory(addresses: npt.NDArray[np.int64], others: Sequence[Source | None]) -> bool:
    """Whether one of the other sources starts at one of the addresses."""
    flat = [source.pointer for source in others if isinstance(source, Flat)]
    return bool(flat) and bool(np.isin(np.array(flat, np.int64), addresses).any())
