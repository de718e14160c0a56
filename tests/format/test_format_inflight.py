"""In-flight records name the nodes that hold an attempt; those of the first releases do not."""

from __future__ import annotations

import msgspec
import pytest

from groupio.errors import IntegrityError, InvalidInput
from groupio.format.envelope import RecordKind, wrap
from groupio.format.limits import TEXT_MAX
from groupio.format.records import InflightRecord, decode_inflight, encode_inflight
from groupio.model import DecisionKey

KEY = DecisionKey(1, 5, 2)
RECORD = InflightRecord(KEY, 2, 4, "w1", 1.5, "boot", 77, 123456, "host", (), ("n1", "n2"))
PATH = f"inflight/{KEY}"


def without_nodes() -> bytes:
    """A record as releases wrote it whose epochs were all of one node."""
    fields = msgspec.structs.asdict(RECORD)
    del fields["nodes"]
    return wrap(RecordKind.INFLIGHT, msgspec.msgpack.encode(fields))


def test_the_nodes_are_kept() -> None:
    assert decode_inflight(encode_inflight(RECORD), PATH) == RECORD


def test_a_record_without_nodes_is_of_one_host() -> None:
    found = decode_inflight(without_nodes(), PATH)
    assert found == msgspec.structs.replace(RECORD, nodes=())
    assert found.host == "host"


@pytest.mark.parametrize("nodes", [("n" * (TEXT_MAX + 1),), (7,), "n1", None])
def test_what_are_no_nodes_is_damage(nodes: object) -> None:
    fields = {**msgspec.structs.asdict(RECORD), "nodes": nodes}
    with pytest.raises(IntegrityError):
        decode_inflight(wrap(RecordKind.INFLIGHT, msgspec.msgpack.encode(fields)), PATH)
    with pytest.raises(InvalidInput):
        encode_inflight(msgspec.structs.replace(RECORD, nodes=nodes))
