"""The ``.metadata`` of a door, unpickled without torch: stand-ins take the place of its classes.

tests/torch compares it with what torch itself writes.
"""

from __future__ import annotations

import io
import pickle
import pickletools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from groupio.errors import InvalidInput
from groupio.format.dcp_metadata import TensorEntry, ValueEntry, encode_metadata

SEGMENT = "../../segments/L00000001-E00000000000000001000-A000001-node0-0000.seg"


class Object:
    """An object of torch: its class, the arguments of its making, its fields or state."""

    def __init__(self, kind: str, arguments: tuple[Any, ...] = ()) -> None:
        self.kind = kind
        self.arguments = arguments
        self.state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __hash__(self) -> int:
        return hash((self.kind, self.arguments, tuple(sorted(map(str, self.state or ())))))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Object) and vars(self) == vars(other)

    def __repr__(self) -> str:
        return f"{self.kind}{self.arguments}{self.state}"


def stand_in(module: str, name: str) -> Any:
    kind = f"{module}.{name}".removeprefix("torch.distributed.checkpoint.")
    if name in ("strided", "float32", "uint16", "float8_e4m3fn"):
        return Object(kind)
    if name in ("Size", "_MEM_FORMAT_ENCODING"):
        return lambda *arguments: Object(kind, arguments)

    class Made:
        def __new__(cls) -> Any:
            return Object(kind)

    return Made


class Unpickler(pickle.Unpickler):
    """Knows no class but the stand-ins."""

    def find_class(self, module: str, name: str) -> Any:
        return stand_in(module, name)


def unpickled(data: bytes) -> Any:
    return Unpickler(io.BytesIO(data)).load()


def size(*sizes: int) -> Object:
    return Object("torch.Size", (sizes,))


TENSORS = (
    TensorEntry(
        "model.w",
        "float32",
        (8, 3),
        [((0, 0), (5, 3)), ((5, 0), (3, 3))],
        [(SEGMENT, 4096, 700), ("__extra.bin", 0, 300)],
    ),
    TensorEntry("s", "uint16", (), [((), ())], [("__extra.bin", 300, 1 << 33)]),
    TensorEntry("none", "float8_e4m3fn", (0, 3), [], []),
)
VALUES = (ValueEntry("groups.0.lr", ("__values.bin", 0, 70)),)
PATHS: dict[str, tuple[str | int, ...]] = {
    "model.w": ("model", "w"),
    "groups.0.lr": ("groups", 0, "lr"),
    "not there": ("x",),
}


def test_it_unpickles_to_the_objects_of_torch() -> None:
    metadata = unpickled(encode_metadata(TENSORS, VALUES, PATHS))
    assert metadata.kind == "metadata.Metadata"
    state = metadata.state
    assert list(state) == ["state_dict_metadata", "planner_data", "storage_data", "version"]
    assert state["version"] == "1.0.0"
    assert state["planner_data"] == {
        "model.w": ("model", "w"),
        "groups.0.lr": ("groups", 0, "lr"),
        "s": ("s",),
        "none": ("none",),
    }
    described = state["state_dict_metadata"]
    assert list(described) == ["model.w", "groups.0.lr", "s", "none"]
    assert described["groups.0.lr"] == Object("metadata.BytesStorageMetadata")
    weight = described["model.w"]
    assert weight.kind == "metadata.TensorStorageMetadata"
    assert weight.state["size"] == size(8, 3)
    assert weight.state["properties"].kind == "metadata.TensorProperties"
    assert weight.state["properties"].state == (
        Object("torch.float32"),
        Object("torch.strided"),
        False,
        Object("metadata._MEM_FORMAT_ENCODING", (0,)),
        False,
    )
    assert [chunk.kind for chunk in weight.state["chunks"]] == ["metadata.ChunkStorageMetadata"] * 2
    assert [chunk.state for chunk in weight.state["chunks"]] == [
        {"offsets": size(0, 0), "sizes": size(5, 3)},
        {"offsets": size(5, 0), "sizes": size(3, 3)},
    ]
    assert described["s"].state["chunks"][0].state == {"offsets": size(), "sizes": size()}
    assert described["none"].state["chunks"] == []
    stored = [(key.kind, key.state, place.kind, place.state)
              for key, place in state["storage_data"].items()]  # fmt: skip

    def row(name: str, number: int | None, corner: Any, path: str, at: int, length: int) -> Any:
        key = {"fqn": name, "index": number} | ({} if corner is None else {"offset": corner})
        place = {"relative_path": path, "offset": at, "length": length}
        return ("metadata.MetadataIndex", key, "filesystem._StorageInfo", place)

    assert stored == [
        row("model.w", 0, size(0, 0), SEGMENT, 4096, 700),
        row("model.w", 1, size(5, 0), "__extra.bin", 0, 300),
        row("groups.0.lr", None, None, "__values.bin", 0, 70),
        row("s", 0, size(), "__extra.bin", 300, 1 << 33),
    ]


def test_only_known_names_of_torch_stand_in_it() -> None:
    data = encode_metadata(TENSORS, VALUES, PATHS)
    names = {argument for code, argument, _ in pickletools.genops(data) if code.name == "GLOBAL"}
    assert {name.split(" ")[0] for name in names} == {
        "torch",
        "torch.distributed.checkpoint.metadata",
        "torch.distributed.checkpoint.filesystem",
    }
    assert max(code.proto for code, _, _ in pickletools.genops(data)) == 2


names_of = st.text(min_size=1, max_size=12)
boxes_of = st.lists(
    st.tuples(st.tuples(*[st.integers(0, 1 << 40)] * 2), st.tuples(*[st.integers(0, 300)] * 2)),
    max_size=4,
    unique_by=lambda box: box[0],
)


@given(
    st.dictionaries(names_of, boxes_of, max_size=30),
    st.dictionaries(names_of, st.lists(names_of | st.integers(0, 999), min_size=1, max_size=4)),
)
def test_any_names_numbers_and_paths_come_back(
    drawn: dict[str, Any], keys: dict[str, list[str | int]]
) -> None:
    entries = [
        TensorEntry(name, "float32", (9, 9), boxes, [(name, k, k << 20) for k in range(len(boxes))])
        for name, boxes in drawn.items()
    ]
    values = [ValueEntry("v:" + name * 100, (name, 1, 2)) for name in keys]
    paths = {name: tuple(path) for name, path in keys.items()}
    state = unpickled(encode_metadata(entries, values, paths)).state
    names = [*drawn, *("v:" + name * 100 for name in keys)]
    assert list(state["state_dict_metadata"]) == sorted(
        names, key=lambda name: [*paths, name].index(name)
    )
    for name, boxes in drawn.items():
        chunks = state["state_dict_metadata"][name].state["chunks"]
        assert [
            (c.state["offsets"].arguments[0], c.state["sizes"].arguments[0]) for c in chunks
        ] == boxes
        assert state["planner_data"][name] == paths.get(name, (name,))
    places = [
        (key.state["fqn"], key.state["index"], *place.state.values())
        for key, place in state["storage_data"].items()
        if key.state["index"] is not None
    ]
    assert sorted(places) == sorted(
        (name, k, name, k, k << 20) for name, boxes in drawn.items() for k in range(len(boxes))
    )


@pytest.mark.parametrize(
    ("tensors", "values", "words"),
    [
        ([TENSORS[0]._replace(dtype="float2")], (), "'model.w' of dtype 'float2'"),
        ([TENSORS[0]._replace(places=[])], (), "2 boxes in 0 places"),
        ([TENSORS[1], TENSORS[1]], (), "'s' twice"),
        ([TENSORS[1]], [ValueEntry("s", ("x", 0, 1))], "'s' twice"),
    ],
)
def test_what_cannot_be_written(tensors: Any, values: Any, words: str) -> None:
    with pytest.raises(InvalidInput, match=words):
        encode_metadata(tensors, values, {})


def test_20_000_tensors_take_little_room() -> None:
    entries = [
        TensorEntry(
            f"model.layers.{n // 9}.mlp{n % 9}.weight",
            "bfloat16",
            (16, n % 7),
            [((0, 0), (16, n % 7))],
            [(SEGMENT, 4134 + 128 * n, 3_000_000_000 + 100 * n)],
        )
        for n in range(20_000)
    ]
    paths = {entry.name: ("model", entry.name[6:]) for entry in entries}
    assert len(encode_metadata(entries, (), paths)) < 200 * len(entries)
