"""A cached plan comes back only for the group and the duplicates it was made for."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from plan_help import raw, report

from groupio.errors import InvalidInput
from groupio.plan.bundles import bundle
from groupio.plan.cache import PlanCache
from groupio.plan.grouped import structure
from groupio.plan.merge import merge

KEYS = st.sampled_from([b"f1", b"f2", b"f3"])
SHAPES = st.sampled_from([b"s1", b"s2"])


@given(calls=st.lists(st.tuples(st.booleans(), KEYS, SHAPES), max_size=30), limit=st.integers(1, 3))
def test_only_equal_keys_hit(calls: list[tuple[bool, bytes, bytes]], limit: int) -> None:
    cache: PlanCache[int] = PlanCache(limit)
    model: OrderedDict[bytes, tuple[bytes, int]] = OrderedDict()
    hits = misses = refused = 0
    for number, (is_put, key, shape) in enumerate(calls):
        if is_put:
            cache.put(key, shape, number)
            model.pop(key, None)
            model[key] = (shape, number)
            while len(model) > limit:
                model.popitem(last=False)
            continue
        got = cache.get(key, shape)
        if key not in model:
            misses += 1
            assert got is None
        elif model[key][0] != shape:
            refused += 1
            assert got is None
        else:
            hits += 1
            assert got == model[key][1]
            model.move_to_end(key)
        assert len(cache) == len(model) <= limit
    assert (cache.hits, cache.misses, cache.refused) == (hits, misses, refused)


def test_a_lost_replica_refuses_the_plan() -> None:
    items = [raw("a", 64), raw("b", 64)]

    def duplicates(*saved: str) -> bytes:
        reports = [report("n0", {r: (items, values) for r, values in enumerate(saved)})]
        merged = merge(reports)
        wanted = np.ones(len(merged.lengths), np.bool_)
        found = bundle(merged.lengths, merged.holder_set, merged.holder_sets, wanted)
        return structure(found.classes)

    cache: PlanCache[str] = PlanCache(4)
    cache.put(b"f", duplicates("ab", "ab"), "plan")
    assert cache.get(b"f", duplicates("cd", "cd")) == "plan"
    assert cache.get(b"f", duplicates("cd", "ce")) is None
    assert (cache.hits, cache.refused) == (1, 1)


def test_an_empty_cache_is_refused() -> None:
    with pytest.raises(InvalidInput, match="0 plans"):
        PlanCache(0)
