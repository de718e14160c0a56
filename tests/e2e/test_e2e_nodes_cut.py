"""A link that loses all in one direction: typed errors in time, and no lasting harm."""

from __future__ import annotations

import time
from typing import Any

import pytest
from nodes_help import call_save, committed, outcomes, released, restored, save

from groupio.errors import GroupAborted, GroupTimeout


@pytest.mark.root
def test_to_the_controller_and_back(make_cluster: Any) -> None:
    cluster = make_cluster(3, hurry=True).up()
    ranks = cluster.connect()
    assert committed(save(ranks, 1))
    other, ruler = cluster.others[0].number, cluster.ruler.number
    for epoch, (a, b) in enumerate(((other, ruler), (ruler, other)), start=2):
        cluster.net.cut(a, b)
        began = time.monotonic()
        call_save(ranks, epoch, deadline_s=6)
        released(ranks)
        for one in outcomes(ranks, epoch):
            assert isinstance(one, GroupAborted | GroupTimeout), one
        assert time.monotonic() - began < 12
        cluster.net.mend(a, b)
    epoch = next(e for e in range(4, 8) if committed(save(ranks, e, deadline_s=8)))
    restored(ranks[0], 3, epoch)
