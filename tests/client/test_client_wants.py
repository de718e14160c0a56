"""Parts of chunks, strided memory and whole chunks, read from a real store in one go."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from client_store import StoreBuilder, flip

from groupio.backend.base import Backend
from groupio.client import chunk_reader
from groupio.client.parts import Catalogue
from groupio.client.store_reader import StoreReader
from groupio.client.values import Part
from groupio.client.wants import Collector
from groupio.errors import IntegrityError
from groupio.plan.read import Box

FULL = np.random.default_rng(3).standard_normal((1500, 1024))  # 512 rows in a chunk
HALVES = [
    {"w": Part(FULL[:700], FULL.shape, (0, 0)), "small": np.arange(10)},
    {"w": Part(FULL[700:], FULL.shape, (700, 0)), "small": np.arange(10), "text": "x"},
]


def collect(reader: StoreReader, box: Box, into: np.ndarray[Any, Any]) -> tuple[Any, Collector]:
    manifest = reader.resolve()
    catalogue, wants = Catalogue(manifest, 0), Collector()
    for saved in catalogue.everyone("w").saved:
        lo = np.maximum(saved.box.offsets, box.offsets)
        hi = np.minimum(np.add(*saved.box), np.add(*box))
        if (hi > lo).all():
            at = tuple(slice(a - o, b - o) for a, b, o in zip(lo, hi, box.offsets, strict=True))
            part = Box(tuple(lo.tolist()), tuple((hi - lo).tolist()))
            wants.add_box(saved.spec, catalogue.rows(saved), part, into[at])
    return manifest, wants


@pytest.mark.parametrize(
    "box",
    [
        Box((0, 0), (1500, 1024)),
        Box((500, 0), (600, 1024)),
        Box((690, 3), (20, 5)),
        Box((3, 1023), (1400, 1)),
        Box((1499, 0), (1, 1024)),
    ],
)
@pytest.mark.parametrize("order", ["C", "F"])
def test_boxes_of_a_tensor_saved_in_two_halves(store: StoreBuilder, box: Box, order: str) -> None:
    store.commit(1, HALVES)
    into: Any = np.zeros(box.shape, order=order)  # type: ignore[call-overload]
    with StoreReader.open(store.path) as reader:
        manifest, wants = collect(reader, box, into)
        reader.read_wants(manifest, wants.finish())
    corner = tuple(slice(lo, lo + size) for lo, size in zip(*box, strict=True))
    assert np.array_equal(into, FULL[corner])


def test_whole_chunks_go_straight_to_their_memory(store: StoreBuilder) -> None:
    store.commit(1, HALVES)
    into = np.zeros((1500, 1024))
    with StoreReader.open(store.path) as reader:
        _, wants = collect(reader, Box((0, 0), FULL.shape), into)
        assert not wants.finish().copies
        _, wants = collect(reader, Box((100, 0), (1000, 1024)), into[:1000])
        found = wants.finish()
    # Rows 512..699 and 700..1023 are whole chunks, 100..511 and 1024..1099 parts of one.
    assert len(found.rows) == 2
    assert len(found.copies) == 2
    assert len(found.all_rows()) == 4


def test_every_chunk_is_read_once(store: StoreBuilder, monkeypatch: pytest.MonkeyPatch) -> None:
    store.commit(1, HALVES)
    read: list[tuple[str, int, int]] = []
    plain_reader = type(store.backend).reader

    def counting(self: Any, area: str, name: str) -> Any:
        reader = plain_reader(self, area, name)
        if area == "segments":
            read_into = reader.read_into

            def count(offset: int, view: memoryview) -> None:
                read.append((name, offset, len(view)))
                read_into(offset, view)

            reader.read_into = count
        return reader

    monkeypatch.setattr(type(store.backend), "reader", counting)
    one, other = np.zeros((600, 1024)), np.zeros((600, 1024), order="F")
    with StoreReader.open(store.path) as reader:
        manifest, wants = collect(reader, Box((500, 0), (600, 1024)), one)
        again = collect(reader, Box((500, 0), (600, 1024)), other)[1].finish()
        both = wants.finish()
        merged = chunk_reader.Wants(
            both.rows, both.views_index, both.offsets, both.views, [*both.copies, *again.copies]
        )
        reader.read_wants(manifest, merged)
    assert np.array_equal(one, FULL[500:1100])
    assert np.array_equal(other, FULL[500:1100])
    assert len(read) == len(set(read)) == 4


@pytest.mark.parametrize("rows", [(0, 1500), (3, 4)])
def test_damage_is_found_in_parts_too(store: StoreBuilder, rows: tuple[int, int]) -> None:
    key = store.commit(1, HALVES)
    flip(store.segment_path(key), 4096 + (2 << 20))
    into = np.zeros((rows[1] - rows[0], 7))
    told: list[Any] = []
    with StoreReader.open(store.path) as reader:
        manifest, wants = collect(reader, Box((rows[0], 2), into.shape), into)
        with pytest.raises(IntegrityError) as caught:
            reader.read_wants(manifest, wants.finish(), on_damage=told.append)
    assert caught.value.chunk == told[0][0].hex()
    assert not into[:3].any()  # nothing of a damaged chunk was handed on


def test_small_chunks_are_read_together_for_copies(store: StoreBuilder) -> None:
    items = {f"w{n}": np.full((4, 4), n) for n in range(100)}
    store.commit(1, [items])
    into = {name: np.zeros((4, 4), np.int64).T for name in items}
    columns = {name: np.zeros((4, 1), np.int64) for name in items}
    with StoreReader.open(store.path) as reader:
        manifest = reader.resolve()
        catalogue, wants = Catalogue(manifest, 0), Collector()
        for name in items:
            saved = catalogue.own(name)[0]
            rows = catalogue.rows(saved)
            wants.add_box(saved.spec, rows, saved.box, into[name])
            wants.add_box(saved.spec, rows, Box((0, 2), (4, 1)), columns[name])
        reader.read_wants(manifest, wants.finish())
    for n, name in enumerate(items):
        assert (into[name] == n).all()
        assert (columns[name] == n).all()


def test_fetch_is_called_once_also_for_nothing(store: StoreBuilder) -> None:
    store.commit(1, HALVES)
    calls: list[Any] = []

    def fetch(backend: Backend, *rest: Any, **more: Any) -> list[bytes]:
        calls.append(more["epoch"])
        return []

    with StoreReader.open(store.path) as reader:
        reader.read_wants(reader.resolve(), Collector().finish(), fetch=fetch)
        reader.read_wants(reader.resolve(), Collector().finish())
    assert calls == [1]


def test_a_catalogue_sees_what_each_member_saved(store: StoreBuilder) -> None:
    store.commit(1, HALVES)
    with StoreReader.open(store.path) as reader:
        catalogue = Catalogue(reader.resolve(), 1)
        assert (catalogue.has_own, catalogue.others) == (True, 1)
        assert list(catalogue.names_of(0)) == ["w", "small"]
        assert [saved.rank for saved in catalogue.everyone("w").saved] == [1, 0]
        assert [saved.rank for saved in catalogue.everyone("small").saved] == [1]
        assert catalogue.everyone("text").saved[0].rank == 1
        assert catalogue.find(1, "text") is not None
        assert catalogue.find(0, "text") is None
        late = Catalogue(reader.resolve(), 5)
        assert (late.has_own, late.others, list(late.own("w"))) == (False, 2, [])
        assert list(late.ranks()) == [0, 1]
