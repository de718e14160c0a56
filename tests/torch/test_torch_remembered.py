"""A tree is used again only for a state dict of the same form, and keeps no tensor alive."""

from __future__ import annotations

import gc
import time
import weakref
from collections import OrderedDict
from typing import Any

import pytest
import torch

from groupio.client.values import Encoded
from groupio.errors import InvalidInput
from groupio.format.codec import decode_plain
from groupio.format.structure import STRUCTURE, encode_structure
from groupio.torch import remembered
from groupio.torch.flatten import flatten
from groupio.torch.remembered import Remembered
from groupio.torch.saving import items_of


def forms() -> list[Any]:
    t = torch.zeros
    return [
        {"a": t(2), "b": {"c": 1}},
        {"b": {"c": 1}, "a": t(2)},
        {"a": t(2), "b": {"d": 1}},
        {"a": t(2), "b": {"c": [1, 2]}},
        {"a": t(2), "b": {"c": [t(1)]}},
        {"a": t(2), "b": {"c": (t(1),)}},
        {"a": t(2), "b": [1, t(1)]},
        {"a": {}, "b": {"c": 1}},
        {"a": t(2), "b": 3},
        OrderedDict({"a": t(2), "b": {"c": 1}}),
        {1: t(2)},
        {"1": t(2)},
        {True: t(2)},
        {1.0: t(2)},
        {(1,): t(2)},
        {(True,): t(2)},
        {"a.b": 1, "a": {"b": 2}},
        {"a.b": 1, "a": {"c": 2}},
        {"a": t(2, dtype=torch.complex32), "b": {"c": 1}},
        {},
    ]


@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_items_are_those_of_a_first_save() -> None:
    given = forms() * 3
    for one in given[:20]:
        for other in given:
            items_of(one)
            items = items_of(other)
            tree = flatten(other)
            names = [leaf.name for leaf in tree.leaves()]
            assert list(items) == [*names, STRUCTURE]
            for leaf in tree.leaves():
                if isinstance(leaf.value, torch.Tensor):
                    assert items[leaf.name].data_ptr() == leaf.value.data_ptr()
                    leaf.note = "complex32" if leaf.value.dtype == torch.complex32 else ""
                else:
                    item = items[leaf.name]
                    item = decode_plain(item.data) if isinstance(item, Encoded) else item
                    assert repr(item) == repr(leaf.value)
            assert decode_plain(items[STRUCTURE].data) == encode_structure(tree)


def test_what_cannot_be_stored_is_refused_at_every_save(monkeypatch: pytest.MonkeyPatch) -> None:
    state: dict[Any, Any] = {"a": {"x": 1}, "t": torch.zeros(1)}
    items_of(state)
    calls: list[Any] = []
    monkeypatch.setattr(remembered, "flatten", lambda given: calls.append(given))
    items_of(state)
    assert not calls
    monkeypatch.undo()
    for bad in (print, object(), float):
        state["a"]["x"] = bad
        with pytest.raises(InvalidInput, match=r"\['a'\]\['x'\]"):
            items_of(state)
    state["a"]["x"] = torch.zeros(1).to_sparse()
    with pytest.raises(InvalidInput, match="sparse"):
        items_of(state)
    with pytest.raises(InvalidInput, match="a dict"):
        items_of([1])  # type: ignore[arg-type]


def test_no_tensor_is_kept_alive() -> None:
    trees = Remembered()
    state = {"a": torch.zeros(3), "b": [torch.zeros(1), {"c": "text"}]}
    alive = [weakref.ref(state["a"]), weakref.ref(state["b"][0])]
    for _ in range(2):
        with trees.flattened(state) as tree:
            assert [leaf.name for leaf in tree.root.leaves()] == ["a", "b.0", "b.1.c"]
    with trees.flattened({"a": 1}):
        pass
    state.clear()
    gc.collect()
    assert [ref() for ref in alive] == [None, None]


def test_a_repeated_save_of_many_tensors_is_prepared_quickly() -> None:
    state = {f"layers.{n}.w": torch.zeros(16) for n in range(20_000)}
    times = []
    for _ in range(5):
        begin = time.process_time()
        items_of(state)
        times.append(time.process_time() - begin)
    assert min(times[1:]) < 0.15
    assert min(times[1:]) < times[0]
