"""Every difference between a state dict and what was saved is found before anything is touched."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch_epochs import saved_by

from groupio.client.parts import Catalogue, Saved
from groupio.errors import InvalidInput
from groupio.format.codec import Converted, decode_plain
from groupio.format.structure import STRUCTURE, decode_structure, encode_structure
from groupio.torch.flatten import flatten
from groupio.torch.matching import Matching, match, template_of
from groupio.torch.saving import items_of


def compare(here: Any, saved: Any) -> Matching:
    items = items_of(saved)
    tree = decode_structure(decode_plain(items[STRUCTURE].data))
    parts = Catalogue(saved_by(items), 0)

    def read(saved: Saved, converted: list[Converted]) -> Any:
        return decode_plain(items[saved.spec.name].data, converted)

    return match(template_of(here), tree, parts, read)


def t(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


def test_equal_state_dicts_fit() -> None:
    state = {"m": {"w": t(2), 0: t(3)}, "g": [{"lr": 0.1, "t": (t(1), 2)}], "n": None}
    found = compare(state, state)
    assert found.mismatch(True, "x") is None
    assert set(found.fill) == {"m.w", "m.0", "g.0.t.0"}
    assert [leaf.name for leaf, _ in found.replace] == ["g.0.lr", "g.0.t.1", "n"]


def test_all_differences_are_listed_at_once() -> None:
    here = {"a": t(2), "b": t(2), "only": {"x": t(1)}, "c": t(2), "d": t(1), "k": {0: 1}}
    saved = {
        "a": t(3), "b": t(2, dtype=torch.bfloat16), "c": 5, "more": t(1), "d": {"y": t(1)},
        "k": {"0": 1},
    }  # fmt: skip
    error = compare(here, saved).mismatch(True, "epoch 3")
    assert error is not None
    assert error.missing == ("only.x", "k.0")
    assert error.unexpected == ("k.0", "more")
    assert error.different == ("a", "b", "c", "d")
    for words in (
        "epoch 3", "a (float32 [2] here, float32 [3] saved)",
        "b (float32 [2] here, bfloat16 [2] saved)", "c (a tensor here, a plain value saved)",
        "d (a tensor here, a dict with values saved)", "Nothing was changed",
    ):  # fmt: skip
        assert words in error.message


def test_without_strict_only_different_tensors_are_an_error() -> None:
    loose = compare({"a": t(1), "b": 1}, {"a": t(1), "c": 1})
    assert loose.mismatch(False, "x") is None
    assert (loose.missing, loose.unexpected) == (["b"], ["c"])
    assert compare({"a": t(1)}, {"a": t(2)}).mismatch(False, "x") is not None


def test_plain_leaves_take_whole_subtrees() -> None:
    found = compare({"a": None, "l": [], "n": 3}, {"a": {"x": [t(1)]}, "l": [t(1)], "n": t(2)})
    assert found.mismatch(True, "x") is None
    assert [leaf.name for leaf, _ in found.replace] == ["a", "l", "n"]
    assert not found.fill


def test_containers_of_another_kind_do_not_fit() -> None:
    found = compare({"a": {0: t(1)}}, {"a": [t(1)]})
    assert (found.missing, found.unexpected) == (["a.0"], ["a.0"])
    # A tuple and a list of the same things do.
    assert compare({"a": [t(1)]}, {"a": (t(1),)}).mismatch(True, "x") is None


def test_an_optimizer_without_state_gets_a_hint() -> None:
    model = torch.nn.Linear(2, 2)
    fresh = torch.optim.AdamW(model.parameters())
    stepped = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    stepped.step()
    error = compare({"optim": fresh.state_dict()}, {"optim": stepped.state_dict()}).mismatch(
        True, "x"
    )
    assert error is not None
    assert "get the state dicts from torch.distributed.checkpoint.state_dict" in error.message
    assert len(error.unexpected) == 6


def test_tied_tensors_must_have_been_saved_equal() -> None:
    shared = t(2)
    here = {"a": shared, "b": shared, "view": shared[:1]}
    saved = {"a": t(2), "b": t(2), "view": t(1)}
    assert compare(here, saved).mismatch(True, "x") is None
    saved["b"][1] = 5
    error = compare(here, saved).mismatch(True, "x")
    assert error is not None
    assert error.different == ("b",)
    assert "shares its memory with a" in error.message


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "build",
    [lambda: torch.zeros(1).expand(3), lambda: torch.zeros(2, dtype=torch.complex32).conj()],
)
def test_views_that_cannot_be_filled_are_refused(build: Any) -> None:
    with pytest.raises(InvalidInput, match=r"\['a'\].*clone\(\)"):
        template_of({"a": build()})


def test_structure_is_one_item_of_plain_values() -> None:
    items = items_of({"a": {"b": t(1)}, "c": 1})
    assert list(items) == ["a.b", "c", STRUCTURE]
    assert decode_plain(items[STRUCTURE].data) == encode_structure(
        flatten({"a": {"b": t(1)}, "c": 1})
    )
