"""Checks what must hold inside a manifest beyond its digests."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from groupio.errors import InvalidInput
from groupio.format.columns import damaged
from groupio.model import DIGEST_BYTES, ChunkTable, Manifest, MemberTable
from groupio.plan.layout import lay_out


def check_manifest(
    manifest: Manifest, path: str, chunk_lengths: dict[bytes, npt.NDArray[np.int64]] | None = None
) -> None:
    """IntegrityError(path) when the parts of ``manifest`` contradict each other.

    ``chunk_lengths`` keeps, by the id of an item table, the lengths of the chunks that its items
    are cut into, for further manifests.
    """
    lengths = {} if chunk_lengths is None else chunk_lengths
    for wrong in _contradictions(manifest):
        raise damaged(path, wrong)
    seen: set[tuple[bytes, int]] = set()
    for member in manifest.members:
        # Members that saved the same items and bytes share both arrays; one check does for all.
        same = (member.items_id, id(member.refs))
        if same not in seen:
            seen.add(same)
            if member.items_id not in lengths:
                lengths[member.items_id] = _chunk_lengths(member, path)
            check_member_chunks(member, manifest.chunks, lengths[member.items_id], path)


def _chunk_lengths(member: MemberTable, path: str) -> npt.NDArray[np.int64]:
    try:
        return lay_out(member.items).chunk_length
    except InvalidInput as error:
        raise damaged(path, f"the items of rank {member.rank}: {error.message}") from None


def check_member_chunks(
    member: MemberTable, chunks: ChunkTable, expected: npt.NDArray[np.int64], path: str
) -> None:
    """IntegrityError(path) unless the chunks of ``member`` have just the lengths that its items
    are cut into."""
    if not np.array_equal(expected, chunks.lengths[member.refs]):
        raise damaged(path, f"the chunks of rank {member.rank} do not fit the sizes of its items")


def _contradictions(manifest: Manifest) -> Iterator[str]:
    header, chunks = manifest.header, manifest.chunks
    if [member.rank for member in manifest.members] != list(range(header.world_size)):
        yield f"it does not have all of its {header.world_size} members"
    sums = (
        ("bytes_logical", sum(member.bytes_logical for member in manifest.members)),
        ("bytes_unique", int(chunks.lengths.sum())),
        ("bytes_stored", sum(segment.bytes for segment in manifest.segments if segment.own)),
    )
    for name, total in sums:
        if getattr(header, name) != total:
            yield f"it states {name} {getattr(header, name)}, and its parts add up to {total}"
    if len(np.unique(_as_keys(chunks.digests))) != len(chunks):
        yield "it lists a chunk twice"
    order = np.lexsort((chunks.offsets, chunks.segments))
    homes, starts = chunks.segments[order], chunks.offsets[order]
    ends = starts + chunks.lengths[order]
    if ((homes[1:] == homes[:-1]) & (starts[1:] < ends[:-1])).any():
        yield "two of its chunks overlap in a segment"


def _as_keys(digests: npt.NDArray[np.uint8]) -> npt.NDArray[np.void]:
    return np.ascontiguousarray(digests).view(f"V{DIGEST_BYTES}")[:, 0]
