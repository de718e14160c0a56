"""A form that was seen before is used again exactly where a first save would say the same."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from client_store import lease_of
from hypothesis import given, settings
from hypothesis import strategies as st

from groupio.client.forms import GATHERED_BYTES_MAX, Form
from groupio.client.outgoing import Outgoing, Packer
from groupio.client.values import Part, prepare
from groupio.errors import InvalidInput

torch = pytest.importorskip("torch")

MEMORY = torch.arange(4096, dtype=torch.int16)
OTHER = MEMORY.clone()
COMPLEX = torch.tensor([1 + 2j, 3 - 4j])


class Subclass(torch.Tensor):  # type: ignore[name-defined,misc]
    """No plain tensor."""


MAKERS: list[Callable[[], Any]] = [
    lambda: MEMORY[:8],
    lambda: MEMORY[:8].clone(),
    lambda: MEMORY[8:16],
    lambda: OTHER[:8],
    lambda: MEMORY[:8].view(2, 4),
    lambda: MEMORY[:8].view(2, 4).T,
    lambda: MEMORY[:16:2],
    lambda: MEMORY[:8].view(torch.float16),
    lambda: MEMORY[:8].view(torch.int32),
    lambda: MEMORY[:0],
    lambda: MEMORY[:2048],
    lambda: OTHER[:2048],
    lambda: MEMORY[0],
    lambda: torch.nn.Parameter(OTHER[:8].float()),
    lambda: OTHER[:8].float().requires_grad_(),
    lambda: COMPLEX.clone(),
    lambda: COMPLEX.conj(),
    lambda: COMPLEX.conj()[:1].imag,
    lambda: COMPLEX[:1].imag,
    lambda: MEMORY[:8].to_sparse(),
    lambda: MEMORY[:8].to("meta"),
    lambda: MEMORY[:8].clone().as_subclass(Subclass),
    lambda: MEMORY[:8].numpy(),
    lambda: OTHER[:8].numpy().copy(),
    lambda: Part(MEMORY[:8], (16,), (8,)),
    lambda: Part(OTHER[:8].clone(), (16,), (8,)),
    lambda: Part(OTHER[:8].clone(), (16,), (0,)),
    lambda: Part(OTHER[:8].clone(), replicated=True),
    lambda: b"bytes",
    lambda: bytearray(b"bytes"),
    lambda: 3,
    lambda: 1 << 80,
    lambda: "text",
    lambda: None,
    lambda: {1, 2},
]

values = st.integers(0, len(MAKERS) - 1)
names = st.sampled_from(["a", "b", "c", "d", "e"])
states = st.dictionaries(names, values, max_size=5)
declared = st.sampled_from([(), (), ("a",), ("b*",)])


def packed(packer: Packer, items: dict[str, Any], patterns: Any) -> tuple[Any, ...]:
    """All that a save hands over, or why it does not."""
    try:
        out = packer.pack(items, patterns)
    except InvalidInput as error:
        return (error.message,)
    lease = lease_of(out)
    starts, specs = out.layout.item_start.tolist(), out.prepared.specs
    content = [bytes(lease[at : at + spec.nbytes]) for at, spec in zip(starts, specs, strict=True)]
    return out.table, out.items_id, out.layout.total_bytes, specs, content


@settings(max_examples=200, deadline=None)
@given(states, st.lists(st.tuples(st.dictionaries(names, values, max_size=2), declared)))
def test_every_save_is_as_a_first_one(state: dict[str, int], changes: list[Any]) -> None:
    packer = Packer()
    for change, patterns in [({}, ()), ({}, ()), *changes]:
        state = {**state, **change}
        items = {name: MAKERS[number]() for name, number in state.items()}
        assert packed(packer, items, patterns) == packed(Packer(), items, patterns)


@pytest.mark.parametrize("kept", range(len(MAKERS)))
def test_no_value_is_taken_for_another(kept: int) -> None:
    packer = Packer()
    for number in [n for replaced in range(len(MAKERS)) for n in (kept, kept, replaced)]:
        items = {"first": MEMORY[:8], "x": MAKERS[number](), "last": OTHER[8:16]}
        assert packed(packer, items, ()) == packed(Packer(), items, ())


def many(count: int) -> dict[str, Any]:
    return {f"layers.{n}.w": torch.full((n % 40 + 1,), n) for n in range(count)}


def test_a_form_is_used_again_and_keeps_no_tensor_alive() -> None:
    items = many(50)
    form = Form.of(items, prepare(items), ())
    assert form is not None
    for new in (items, many(50)):
        again = form.prepare(new, ())
        assert again is not None
        assert again.pointers is not None
        assert again.pointers.all()
        assert again.specs is form.specs
    assert form.prepare(many(51), ()) is None
    assert form.prepare(many(50), ("layers.1.w",)) is None
    packer = Packer()
    out: list[Outgoing] = [packer.pack(items, ()), packer.pack(items, ())]
    alive = weakref.ref(items["layers.3.w"])
    out.clear()
    items.clear()
    new.clear()
    del again
    gc.collect()
    assert alive() is None


def test_tied_tensors_stay_tied_and_others_are_not() -> None:
    packer = Packer()
    a, b = torch.zeros(9), torch.ones(9)
    tied = {"x": a, "y": b, "z": a}
    first = packer.pack(tied, ())
    again = packer.pack(tied, ())
    assert again.prepared.pointers is not None
    assert again.prepared.specs is first.prepared.specs
    assert [spec.alias for spec in again.prepared.specs] == [-1, -1, 0]
    for other in ({"x": a, "y": b, "z": b}, {"x": a, "y": b, "z": a + 1}, {"x": a, "y": a, "z": a}):
        assert packed(packer, other, ()) == packed(Packer(), other, ())


def test_tensors_around_the_size_that_is_gathered() -> None:
    for size in (1, GATHERED_BYTES_MAX, GATHERED_BYTES_MAX + 1):
        region = torch.randint(0, 255, (600, size), dtype=torch.uint8)
        items = {f"{n}": region[n] for n in range(600)}
        packer = Packer()
        assert packed(packer, items, ()) == packed(packer, items, ())


def test_a_repeated_save_of_many_tensors_costs_little() -> None:
    items = many(20_000)
    packer = Packer()
    times = []
    for _ in range(6):
        started = time.process_time()
        lease_of(packer.pack(items, ()))
        times.append(time.process_time() - started)
    assert min(times[1:]) < 0.1
    assert min(times[1:]) < times[0] / 2


def test_memory_that_was_freed_is_not_read() -> None:
    items = {"x": torch.zeros(64), "y": torch.zeros(64)}
    packer = Packer()
    packer.pack(items, ())
    items["x"].untyped_storage().resize_(0)
    form = Form.of({"y": items["y"]}, prepare({"y": items["y"]}), ())
    assert form is not None
    assert form.prepare({"y": items["x"]}, ()) is None


def test_arrays_of_many_are_found_by_their_addresses() -> None:
    region = np.arange(1000, dtype=np.uint8)
    items = {f"{n}": torch.from_numpy(region[n : n + 1]) for n in range(0, 1000, 3)}
    packer = Packer()
    packer.pack(items, ())
    region += 1
    out = packer.pack(items, ())
    lease = lease_of(out)
    found = [lease[at] for at in out.layout.item_start.tolist()]
    assert found == [int(region[n]) for n in range(0, 1000, 3)]


@pytest.mark.parametrize("enabled", [True, False])
def test_the_garbage_collector_is_left_as_it_was(enabled: bool) -> None:
    (gc.enable if enabled else gc.disable)()
    try:
        Packer().pack({"x": 1}, ())
        with pytest.raises(InvalidInput):
            Packer().pack({"x": object()}, ())
        assert gc.isenabled() == enabled
    finally:
        gc.enable()
