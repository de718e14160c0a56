"""One rank: what comes back is what was saved, bit for bit and type for type."""

from __future__ import annotations

import copy
import math
import random
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

import groupio
import groupio.torch as gt
from groupio.errors import (
    FormatError,
    IntegrityError,
    InvalidInput,
    NotFound,
    StateMismatch,
)
from groupio.format.structure import PATHS, STRUCTURE
from groupio.torch.tensors import as_integers

WAIT_S = 60.0


def save(state: dict[Any, Any], store: str, step: int = 1, **options: Any) -> groupio.SaveHandle:
    handle = gt.save(state, store, step=step, deadline_s=WAIT_S, **options)
    handle.wait("durable", WAIT_S)
    return handle


def bits(tensor: torch.Tensor) -> list[Any]:
    """The tensor as integers: NaNs and signed zeros count by their bits."""
    plain = as_integers(tensor.detach().resolve_conj().resolve_neg()).contiguous()
    return plain.reshape(-1).view(torch.uint8).tolist()


def blank(tensor: torch.Tensor) -> torch.Tensor:
    made = torch.empty(tensor.shape, dtype=tensor.dtype)
    made.untyped_storage().fill_(85)
    return made


def all_dtypes() -> dict[str, torch.Tensor]:
    torch.manual_seed(7)
    found = {}
    for name, dtype in vars(torch).items():
        if isinstance(dtype, torch.dtype) and not name.startswith(("q", "bits")):
            size = torch.empty(0, dtype=dtype).element_size()
            raw = torch.randint(
                0, 2 if dtype is torch.bool else 256, (6 * size,), dtype=torch.uint8
            )
            found[name] = raw.view(dtype).reshape(2, 3)
    return found


@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_every_dtype_keeps_every_bit(store: str) -> None:
    saved = all_dtypes()
    assert {"bfloat16", "float8_e4m3fn", "float8_e5m2fnuz", "uint16", "complex32"} <= set(saved)
    save(saved, store)
    back = {name: blank(tensor) for name, tensor in saved.items()}
    gt.load(back, store)
    assert {n: bits(t) for n, t in back.items()} == {n: bits(t) for n, t in saved.items()}
    taken: dict[str, Any] = dict.fromkeys(saved)
    gt.load(taken, store)
    for name, tensor in saved.items():
        assert taken[name].dtype == tensor.dtype
        assert taken[name].shape == tensor.shape
        assert bits(taken[name]) == bits(tensor)


def test_views_strides_and_odd_shapes(store: str) -> None:
    base = torch.arange(60, dtype=torch.float32).reshape(3, 4, 5)
    special = torch.tensor([0.0, -0.0, math.nan, math.inf, -math.inf])
    saved = {
        "transposed": base.transpose(0, 2),
        "strided": base[:, ::2, 1:4],
        "expanded": torch.tensor([1.5, 2.5]).expand(3, 2),
        "conj": torch.tensor([1 + 2j, 3 - 4j]).conj(),
        "neg": torch.tensor([1 + 2j, 3 - 4j]).conj().imag,
        "scalar": torch.tensor(3.25),
        "empty": torch.empty(0, 7),
        "special": special,
        "payload": torch.tensor([0x7FC12345, -0x00012345], dtype=torch.int32).view(torch.float32),
        "channels_last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "parameter": torch.nn.Parameter(torch.randn(3)),
        "grad": (torch.randn(3, requires_grad=True) * 2),
        "bf16_t": torch.randn(40, 30).bfloat16().t(),
    }
    save(saved, store)
    into = {name: blank(tensor) for name, tensor in saved.items()}
    into["transposed"] = torch.empty(3, 4, 5).transpose(0, 2)
    into["bf16_t"] = torch.empty(40, 30, dtype=torch.bfloat16).t()
    into["parameter"] = torch.nn.Parameter(torch.empty(3))
    kept = {name: (id(tensor), tensor.data_ptr()) for name, tensor in into.items()}
    gt.load(into, store)
    for name, tensor in saved.items():
        assert bits(into[name]) == bits(tensor), name
        assert kept[name] == (id(into[name]), into[name].data_ptr())
    assert into["parameter"].requires_grad


def test_plain_values_come_back_with_their_types(store: str) -> None:
    state: dict[Any, Any] = {
        "none": None, "true": True, "int": -(1 << 80), "float": -0.0, "complex": 1 - 2j,
        "str": "ä\ud800", "bytes": b"\0x", "betas": (0.9, 0.999), "list": [1, "2", [3.0]],
        "numpy": np.arange(6, dtype=np.float32).reshape(2, 3).T, "scalar": np.float64(2.5),
        "nested": {1: {"x": None}, "1": {"x": []}}, "empty": {}, "ordered": OrderedDict(b=1, a=2),
        "python_rng": random.getstate(), "torch_rng": torch.get_rng_state(),
        "dotted.name": 1, "dotted": {"name": 2},
    }  # fmt: skip
    save(state, store)
    into = copy.deepcopy(state)
    for key in state:
        if not isinstance(state[key], dict | torch.Tensor):
            into[key] = "something else"
    into["torch_rng"] = torch.zeros_like(state["torch_rng"])
    into["nested"][1]["x"] = into["dotted"]["name"] = 99
    gt.load(into, store)
    for key, value in state.items():
        assert type(into[key]) is type(value), key
        if isinstance(value, np.ndarray | torch.Tensor):
            assert np.array_equal(into[key], value)
        else:
            assert repr(into[key]) == repr(value), key
    random.setstate(into["python_rng"])
    torch.set_rng_state(into["torch_rng"])


def test_a_plain_leaf_takes_the_whole_subtree(store: str) -> None:
    state = {"m": {"w": torch.randn(3), 1: [{"t": torch.ones(2)}, 5], "n": None}, "k": 1}
    save(state, store)
    into: dict[str, Any] = {"m": None, "k": None}
    gt.load(into, store)
    assert into["k"] == 1
    assert list(into["m"]) == ["w", 1, "n"]
    assert torch.equal(into["m"]["w"], state["m"]["w"])  # type: ignore[index]
    assert torch.equal(into["m"][1][0]["t"], torch.ones(2))
    assert into["m"][1][1] == 5


def test_values_in_tuples_and_lists_are_replaced(store: str) -> None:
    save({"a": [torch.ones(2), 1], "t": (torch.ones(2), 2, [3, torch.zeros(1)])}, store)
    keep = torch.zeros(2)
    inner = [0, torch.ones(1)]
    into: dict[str, Any] = {"a": [torch.zeros(2), 0], "t": (keep, 0, inner)}
    outer = into["a"]
    gt.load(into, store)
    assert into["a"] is outer
    assert outer[1] == 1
    assert into["t"][0] is keep
    assert torch.equal(keep, torch.ones(2))
    assert into["t"][1:] == (2, inner)
    assert inner[0] == 3


def test_saved_are_the_bytes_at_the_call(store: str) -> None:
    model = torch.nn.Linear(512, 512)
    state = {"model": model.state_dict(), "rng": torch.get_rng_state(), "list": [1, 2]}
    before = copy.deepcopy(state)
    handle = gt.save(state, store, step=1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(-1)
    state["rng"].zero_()
    state["list"].append(3)  # type: ignore[attr-defined]
    handle.wait("durable", WAIT_S)
    into: dict[str, Any] = {"model": model.state_dict(), "rng": None, "list": None}
    gt.load(into, store)
    assert torch.equal(model.weight, before["model"]["weight"])  # type: ignore[index]
    assert torch.equal(into["rng"], before["rng"])  # type: ignore[arg-type]
    assert into["list"] == [1, 2]


def test_tied_weights_and_views_are_stored_once_and_alone(store: str) -> None:
    big = torch.randn(1 << 20)
    tied = torch.randn(1 << 18)
    save({"view": big[:10], "a": tied, "b": tied, "c": {"again": tied}}, store)
    info = gt.clients.client_for(store, gt.members.Members(0, 1)).epochs()[0]
    assert info.bytes_stored < tied.nbytes + 64_000
    into = {"view": torch.empty(10), "a": torch.empty(1 << 18), "b": None, "c": None}
    gt.load(into, store)  # type: ignore[arg-type]
    assert torch.equal(into["view"], big[:10])  # type: ignore[arg-type]
    assert torch.equal(into["a"], tied)  # type: ignore[arg-type]
    assert torch.equal(into["c"]["again"], tied)  # type: ignore[index]


def test_training_goes_on_as_if_nothing_had_happened(store: str) -> None:
    def build() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(3)
        model = torch.nn.Sequential(
            torch.nn.Linear(8, 16), torch.nn.Dropout(), torch.nn.Linear(16, 1)
        )
        return model, torch.optim.AdamW(model.parameters(), lr=0.01, amsgrad=True)

    def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        model(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    model, optimizer = build()
    step(model, optimizer)
    state = {
        "model": model.state_dict(), "optim": optimizer.state_dict(), "rng": torch.get_rng_state()
    }  # fmt: skip
    save(state, store, step=1)
    step(model, optimizer)

    other, fresh = build()
    torch.manual_seed(99)
    into: dict[str, Any] = {
        "model": other.state_dict(), "optim": None, "rng": torch.get_rng_state()
    }  # fmt: skip
    assert gt.load(into, store).step == 1
    fresh.load_state_dict(into["optim"])
    torch.set_rng_state(into["rng"])
    step(other, fresh)
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert bits(one) == bits(two)


def test_strict_lists_everything_and_touches_nothing(store: str) -> None:
    save({"a": torch.ones(2), "b": torch.ones(3), "n": 1, "extra": 2}, store)
    into = {"a": torch.zeros(2), "b": torch.zeros(4), "n": 0, "absent": torch.zeros(1)}
    before = copy.deepcopy(into)
    with pytest.raises(StateMismatch) as caught:
        gt.load(into, store)
    assert caught.value.missing == ("absent",)
    assert caught.value.unexpected == ("extra",)
    assert caught.value.different == ("b",)
    assert repr(into) == repr(before)
    into["b"] = torch.zeros(3)
    report = gt.load(into, store, strict=False)
    assert report == gt.LoadReport(1, ("absent",), ("extra",))
    assert into["n"] == 1
    assert torch.equal(into["a"], torch.ones(2))  # type: ignore[arg-type]


def test_steps_latest_and_what_is_not_there(store: str) -> None:
    with pytest.raises(NotFound):
        gt.load({"a": 1}, store)
    for step in (3, 7):
        save({"a": step}, store, step=step)
    into = {"a": 0}
    assert gt.load(into, store).step == 7
    assert gt.load(into, store, step=3).step == 3
    assert into["a"] == 3
    with pytest.raises(NotFound, match="3, 7"):
        gt.load(into, store, step=5)
    for wrong in ("newest", -1, 1.5):
        with pytest.raises(InvalidInput):
            gt.load(into, store, step=wrong)  # type: ignore[arg-type]


def flip(store: str, folder: str, at: float) -> None:
    path = max(Path(store, folder).iterdir(), key=lambda p: p.stat().st_mtime)
    data = bytearray(path.read_bytes())
    data[int(len(data) * at)] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(("folder", "at"), [("segments", 0.5), ("epochs", 0.99), ("epochs", 0.0)])
def test_damage_is_an_error_or_the_older_epoch(store: str, folder: str, at: float) -> None:
    torch.manual_seed(1)
    old, new = torch.randn(1 << 19), torch.randn(1 << 19)
    save({"w": old}, store, step=1)
    save({"w": new}, store, step=2)
    flip(store, folder, at)
    into = {"w": torch.empty(1 << 19)}
    with pytest.raises((IntegrityError, FormatError), match=folder):
        gt.load(into, store)
    report = gt.load(into, store, fallback=True)
    assert report.step == 1
    assert torch.equal(into["w"], old)
    assert [skipped.epoch for skipped in report.skipped_epochs] == [2]
    assert folder in report.skipped_epochs[0].reason


def test_what_cannot_be_saved_says_where(store: str) -> None:
    with pytest.raises(InvalidInput, match=r"\['a'\]\['fn'\].*functions are code"):
        gt.save({"a": {"fn": print}}, store, step=1)
    with pytest.raises(InvalidInput, match=r"\['a'\].*sparse"):
        gt.save({"a": torch.ones(2).to_sparse()}, store, step=1)
    with pytest.raises(InvalidInput, match=r"'k'"):
        gt.save({"k": [1, {2, print}]}, store, step=1)
    with pytest.raises(InvalidInput, match="verify_replicas"):
        gt.save({"k": 1}, store, step=1, verify_replicas="some")
    with pytest.raises(InvalidInput, match="dcp_door"):
        gt.save({"k": 1}, store, step=1, dcp_door="yes")  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="step"):
        gt.save({"k": 1}, store, step="one")  # type: ignore[arg-type]


def test_a_door_is_made_unless_it_is_not_wanted(store: str) -> None:
    for step, wanted in ((1, True), (2, False)):
        handle = save({"a": 1}, store, step=step, dcp_door=wanted)
        assert not any("door" in note for note in handle.wait("durable", WAIT_S).notes)
        assert (Path(store) / "dcp" / str(step)).exists() == wanted


def test_epochs_of_the_plain_client_are_matched_by_name(store: str) -> None:
    with groupio.connect(store) as client:
        items = {"a": 1, "m.w": torch.ones(3), "m.0": np.arange(4.0), "groupio:x": 1}
        client.save(items, epoch=1).wait("durable", WAIT_S)
    into: dict[Any, Any] = {"a": 0, "m": {"w": torch.zeros(3), 0: torch.zeros(4).double()}}
    assert gt.load(into, store) == gt.LoadReport(1)
    assert into["a"] == 1
    assert into["m"]["w"].tolist() == [1, 1, 1]
    assert into["m"][0].tolist() == [0, 1, 2, 3]
    with pytest.raises(StateMismatch) as caught:
        gt.load({"a": 0, "m": {"v": torch.zeros(3), "w": torch.zeros(2)}}, store)
    assert caught.value.missing == ("m.v",)
    assert caught.value.unexpected == ("m.0",)
    assert caught.value.different == ("m.w",)


def test_paths_of_the_dcp_classes_give_whole_subtrees(store: str) -> None:
    paths = {"o.state.0.m": ["o", "state", "0", "m"], "o.groups.0.lr": ["o", "groups", 0, "lr"]}
    with groupio.connect(store) as client:
        items = {"o.state.0.m": torch.ones(3), "o.groups.0.lr": 0.5, PATHS: paths}
        client.save(items, epoch=1).wait("durable", WAIT_S)
    into: dict[Any, Any] = {"o": {"state": {0: {"m": torch.zeros(3)}}, "groups": None}}
    assert gt.load(into, store) == gt.LoadReport(1)
    assert into["o"]["state"][0]["m"].tolist() == [1, 1, 1]
    assert into["o"]["groups"] == [{"lr": 0.5}]
    whole: dict[Any, Any] = {"o": None}
    gt.load(whole, store)
    assert list(whole["o"]) == ["state", "groups"]
    assert whole["o"]["state"]["0"]["m"].tolist() == [1, 1, 1]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_checkpoint_of_torch_is_no_store(tmp_path: Path, store: str) -> None:
    folder = tmp_path / "stock"
    dcp.save({"w": torch.ones(2)}, checkpoint_id=folder, no_dist=True)
    with pytest.raises(InvalidInput, match=r"torch\.distributed\.checkpoint\.load.*groupio"):
        gt.load({"w": torch.zeros(2)}, folder)
    with pytest.raises(InvalidInput, match=r"torch\.distributed\.checkpoint\.load.*groupio"):
        gt.save({"w": torch.zeros(2)}, folder, step=1)
    save({"w": torch.ones(2)}, store)
    view = Path(store, "dcp", "1")
    view.mkdir(parents=True, exist_ok=True)
    (view / ".metadata").touch()
    with pytest.raises(InvalidInput, match=f"give the store {store} and the epoch 1"):
        gt.load({"w": torch.zeros(2)}, view)


def test_the_client_reads_what_torch_saved(store: str) -> None:
    save({"m": {"w": torch.ones(2).bfloat16()}, "n": 3}, store)
    with groupio.connect(store) as client:
        items = client.load()
    assert items["n"] == 3
    assert str(items["m.w"].dtype) == "bfloat16"
    assert STRUCTURE in items


def test_many_small_tensors(store: str) -> None:
    state = {f"p{n}": torch.full((4, 4), n, dtype=torch.float32) for n in range(20_000)}
    save(state, store)
    into = {name: torch.zeros(4, 4) for name in state}
    gt.load(into, store)
    assert all(torch.equal(into[name], tensor) for name, tensor in state.items())
