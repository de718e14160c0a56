from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
from blake3 import blake3
from format_help import (
    KEY,
    Forgery,
    is_damage,
    layout_lengths,
    plain,
    reads,
    reheaded,
    sample_items,
    sample_manifest,
    tensor,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from groupio.errors import FormatError, IntegrityError, InvalidInput, NotFound
from groupio.format.envelope import RecordKind
from groupio.format.items import encode_items, items_id
from groupio.format.manifest import (
    ManifestReader,
    PackedTables,
    SharedTables,
    decode_manifest,
    encode_manifest,
)
from groupio.format.records import segment_name
from groupio.model import (
    CHUNK_BYTES,
    ChunkTable,
    DecisionKey,
    Manifest,
    MemberTable,
    SegmentRef,
)

PATH = f"store/epochs/{KEY}"


def reader_of(data: bytes) -> ManifestReader:
    return ManifestReader(reads(data), len(data), PATH)


def same_arrays(a: Any, b: Any, names: str) -> bool:
    pairs = [(getattr(a, name), getattr(b, name)) for name in names.split()]
    return all(x.dtype == y.dtype and np.array_equal(x, y) for x, y in pairs)


def same(a: Manifest, b: Manifest) -> bool:
    members = all(
        (x.rank, x.items, x.items_id, x.bytes_logical)
        == (y.rank, y.items, y.items_id, y.bytes_logical)
        and same_arrays(x, y, "refs")
        for x, y in zip(a.members, b.members, strict=True)
    )
    return (
        members
        and a.header == b.header
        and a.segments == b.segments
        and same_arrays(a.chunks, b.chunks, "digests lengths segments offsets")
    )


@st.composite
def manifests(draw: st.DrawFn) -> Manifest:
    """Consistent manifests: random items, each member's chunks drawn from a common pool."""
    world = draw(st.integers(1, 4))
    pool: dict[int, list[int]] = {}
    lengths: list[int] = []
    members = []
    for rank in range(world):
        sizes = draw(st.lists(st.integers(0, 3 * CHUNK_BYTES), max_size=4))
        items = tuple(plain(f"item {k}", size) for k, size in enumerate(sizes))
        refs = []
        for length in layout_lengths(items):
            twins = pool.setdefault(length, [])
            if not twins or draw(st.booleans()):
                twins.append(len(lengths))
                lengths.append(length)
            refs.append(draw(st.sampled_from(twins)))
        members.append(
            MemberTable(
                rank, items, items_id(encode_items(items)), np.array(refs, np.int64), sum(sizes)
            )
        )
    n = len(lengths)
    homes = [draw(st.integers(0, 2)) for _ in range(n)]
    ends = [4096, 4096, 4096]
    offsets = []
    for home, length in zip(homes, lengths, strict=True):
        offsets.append(ends[home])
        ends[home] += length + draw(st.integers(0, 4096))
    segments = tuple(
        SegmentRef(segment_name(replace_key(own), "n", k), ends[k] + 100, own, k)
        for k, own in enumerate((True, True, False))
    )
    chunks = ChunkTable(
        np.array([list(blake3(bytes([i])).digest()) for i in range(n)], np.uint8).reshape(n, 32),
        np.array(lengths, np.int64),
        np.array(homes, np.int32),
        np.array(offsets, np.int64),
    )
    header = msgspec.structs.replace(
        sample_manifest().header,
        world_size=world,
        bytes_logical=sum(member.bytes_logical for member in members),
        bytes_unique=sum(lengths),
        bytes_stored=segments[0].bytes + segments[1].bytes,
        metadata=draw(st.dictionaries(st.text(), st.integers() | st.text(), max_size=3)),
    )
    return Manifest(header, segments, chunks, tuple(members))


def replace_key(own: bool) -> DecisionKey:
    return KEY if own else DecisionKey(1, 2, 7)


@settings(max_examples=50)
@given(manifests())
def test_a_manifest_comes_back_and_is_sound(manifest: Manifest) -> None:
    data = encode_manifest(manifest)
    assert same(decode_manifest(data, PATH), manifest)
    assert encode_manifest(decode_manifest(data, PATH)) == data
    reader_of(data).verify_structure()


def test_the_bytes_of_version_1_stay_as_they_are() -> None:
    # Uncompressed parts only: another zlib may compress otherwise and still be read.
    data = encode_manifest(sample_manifest())
    root = Forgery(sample_manifest()).root
    assert data[:12].hex() == "475250494f52454301000100"
    assert root[:6] == ["00112233445566778899aabbccddeeff", "job", 1, 5, 0, 2]
    assert root[9:11] == ["w1", 1.5]
    assert root[15:18] == [["step*"], 3, 2]
    assert [row[1] for row in root[18]] == [125, 96, 24, 12, 24, 64, 155]
    assert root[19:] == [""]  # the door, which the first manifests do not have


def test_a_manifest_of_version_1_can_still_be_read() -> None:
    reader = reader_of(bytes.fromhex(GOLDEN))
    reader.verify_structure()
    assert same(reader.manifest(), sample_manifest())


def test_every_flipped_bit_is_found() -> None:
    data = encode_manifest(sample_manifest())
    for position in range(len(data)):
        for bit in range(8):
            changed = bytearray(data)
            changed[position] ^= 1 << bit
            with pytest.raises(IntegrityError) as caught:
                decode_manifest(bytes(changed), PATH)
            assert is_damage(caught.value, PATH)


def test_every_truncation_and_extension_is_found() -> None:
    data = encode_manifest(sample_manifest())
    for length in range(len(data)):
        with pytest.raises(IntegrityError):
            reader_of(data[:length]).verify_structure()
    with pytest.raises(IntegrityError):
        decode_manifest(data + b"\0", PATH)


@given(st.binary(max_size=300))
def test_random_bytes_are_damage(data: bytes) -> None:
    with pytest.raises(IntegrityError):
        reader_of(data).verify_structure()


def test_the_header_takes_one_small_read() -> None:
    manifest = big_manifest()
    data = encode_manifest(manifest)
    asked: list[tuple[int, int]] = []

    def read(offset: int, length: int) -> bytes:
        asked.append((offset, length))
        return data[offset : offset + length]

    reader = ManifestReader(read, len(data), PATH)
    assert reader.header == manifest.header
    assert asked == [(0, 4096)]
    assert same_arrays(reader.member(1), manifest.members[1], "refs")
    assert sum(length for _, length in asked) < len(data) // 10


def big_manifest(ranks: int = 16, chunks_each: int = 2000) -> Manifest:
    """Many chunks: every rank has its own, of one size."""
    n = ranks * chunks_each
    items = tuple(tensor(f"w{k}", (CHUNK_BYTES,), "uint8", itemsize=1) for k in range(chunks_each))
    table_id = items_id(encode_items(items))
    members = tuple(
        MemberTable(
            rank,
            items,
            table_id,
            np.arange(rank, n, ranks, dtype=np.int64),
            chunks_each * CHUNK_BYTES,
        )
        for rank in range(ranks)
    )
    random_bytes = np.frombuffer(random.Random(1).randbytes(32 * n), np.uint8)
    chunks = ChunkTable(
        random_bytes.reshape(n, 32),
        np.full(n, CHUNK_BYTES),
        np.zeros(n, np.int32),
        4096 + CHUNK_BYTES * np.arange(n),
    )
    own = SegmentRef(segment_name(KEY, "n", 0), 8192 + n * CHUNK_BYTES, True)
    total = n * CHUNK_BYTES
    header = sample_manifest(
        ranks, bytes_logical=total, bytes_unique=total, bytes_stored=own.bytes
    ).header
    return Manifest(header, (own,), chunks, members)


def test_many_chunks_cost_little_more_than_their_digests() -> None:
    manifest = big_manifest()
    data = encode_manifest(manifest)
    assert len(data) < 1.05 * manifest.chunks.digests.nbytes
    reader_of(data).verify_structure()


def test_equal_members_are_stored_once() -> None:
    n = 20_000
    items = tuple(tensor(f"model.layers.{k // 10}.block{k % 10}.weight", (16,)) for k in range(n))
    refs = np.arange(n)
    table_id = items_id(encode_items(items))
    members = tuple(MemberTable(r, items, table_id, refs.copy(), 64 * n) for r in range(4))
    chunks = ChunkTable(
        np.frombuffer(random.Random(1).randbytes(32 * n), np.uint8).reshape(n, 32),
        np.full(n, 64),
        np.zeros(n, np.int32),
        4096 + 64 * np.arange(n),
    )
    own = SegmentRef(segment_name(KEY, "n", 0), 4096 + 64 * n + 700_000, True)
    header = sample_manifest(
        4, bytes_logical=256 * n, bytes_unique=64 * n, bytes_stored=own.bytes
    ).header
    data = encode_manifest(Manifest(header, (own,), chunks, members))
    assert len(data) < chunks.digests.nbytes + 200_000
    reader = reader_of(data)
    reader.verify_structure()
    assert reader.member(0).refs is reader.member(3).refs


def test_item_tables_packed_before_are_used_again() -> None:
    packed: PackedTables = {b"o" * 32: packed_of_another()}
    manifest = sample_manifest()
    plain = encode_manifest(manifest)
    assert encode_manifest(manifest, packed) == plain
    assert set(packed) == {member.items_id for member in manifest.members}
    kept = dict(packed)
    assert encode_manifest(manifest, packed) == plain
    assert all(packed[name] is kept[name] for name in kept)


def packed_of_another() -> tuple[Any, bytes]:
    """What an epoch of other items left."""
    tables: PackedTables = {}
    encode_manifest(sample_manifest(), tables)
    return next(iter(tables.values()))


def test_a_root_larger_than_the_first_read() -> None:
    manifest = sample_manifest(replicated=tuple(f"layer.{k}.*" for k in range(2000)))
    data = encode_manifest(manifest)
    assert reader_of(data).header == manifest.header
    assert same(decode_manifest(data, PATH), manifest)


def test_a_manifest_without_members_chunks_or_segments() -> None:
    empty = np.zeros(0, np.int64)
    chunks = ChunkTable(np.zeros((0, 32), np.uint8), empty, empty.astype(np.int32), empty)
    header = sample_manifest(1, bytes_logical=0, bytes_unique=0, bytes_stored=0).header
    items = (plain("nothing", 0),)
    member = MemberTable(0, items, items_id(encode_items(items)), empty, 0)
    manifest = Manifest(header, (), chunks, (member,))
    data = encode_manifest(manifest)
    assert same(decode_manifest(data, PATH), manifest)
    reader_of(data).verify_structure()
    nobody = Manifest(header, (), chunks, ())
    reader = reader_of(encode_manifest(nobody))
    assert same(reader.manifest(), nobody)
    assert reader.ranks == ()
    with pytest.raises(IntegrityError, match="does not have all of its 1 members"):
        reader.verify_structure()


def test_members_are_found_by_rank() -> None:
    reader = reader_of(encode_manifest(sample_manifest()))
    assert reader.ranks == (0, 1)
    assert reader.member(1).items == sample_items(1)
    for rank in (-1, 2):
        with pytest.raises(NotFound, match=f"no member {rank}") as caught:
            reader.member(rank)
        assert caught.value.member == rank
        assert caught.value.epoch == KEY.epoch


def test_a_manifest_under_the_name_of_another_is_found() -> None:
    data = encode_manifest(sample_manifest())
    with pytest.raises(IntegrityError, match=str(KEY)):
        decode_manifest(data, f"store/epochs/{DecisionKey(1, 6, 0)}")
    assert same(decode_manifest(data, "store/prepared/.tmp-17"), sample_manifest())


def test_other_records_and_versions_are_format_errors() -> None:
    data = encode_manifest(sample_manifest())
    for other in (
        reheaded(data, version=2),
        reheaded(data, kind=2),
        Forgery(sample_manifest()).build(RecordKind.INFLIGHT),
    ):
        with pytest.raises(FormatError) as caught:
            _ = reader_of(other).header
        assert caught.value.path == PATH


def test_a_reader_that_gets_too_little_says_so() -> None:
    data = encode_manifest(sample_manifest())
    with pytest.raises(IntegrityError, match="ends before"):
        ManifestReader(lambda at, n: data[at : at + n - 1], len(data), PATH).manifest()


def changed(**fields: Any) -> Manifest:
    return replace(sample_manifest(), **fields)


def changed_member(**fields: Any) -> Manifest:
    members = sample_manifest().members
    return changed(members=(replace(members[0], **fields), members[1]))


def changed_chunks(**fields: Any) -> Manifest:
    return changed(chunks=replace(sample_manifest().chunks, **fields))


@pytest.mark.parametrize(
    ("manifest", "why"),
    [
        (sample_manifest(metadata={"a": object()}), r"metadata\['a'\] is of type object"),
        (sample_manifest(metadata={"a": "x" * (1 << 20)}), "cannot be written"),
        (sample_manifest(job="\ud800"), "surrogates"),
        (sample_manifest(epoch=1 << 70), "cannot be written"),
        (sample_manifest(store_id="nonsense"), "cannot be written"),
        (sample_manifest(world_size=1), "member is out of range"),
        (changed_member(items_id=bytes(32)), "items_id of rank 0"),
        (changed_member(refs=np.array([0, 3])), "ref of rank 0"),
        (changed_member(refs=np.array([-1, 0])), "ref of rank 0"),
        (changed(members=sample_manifest().members[::-1]), "not in order"),
        (changed(segments=()), "not listed"),
        (changed_chunks(segments=np.full(3, -1, np.int32)), "not listed"),
        (changed_chunks(digests=np.zeros((3, 31), np.uint8)), "chunk arrays have the shapes"),
        (changed_chunks(digests=np.zeros((3, 32), np.int8)), "chunk arrays have the shapes"),
        (changed_chunks(offsets=np.zeros(2, np.int64)), "chunk arrays have the shapes"),
        (changed_chunks(offsets=np.zeros(3, np.int64)), "not lie inside"),
    ],
)
def test_a_manifest_that_no_one_could_read_is_not_written(manifest: Manifest, why: str) -> None:
    with pytest.raises(InvalidInput, match=why):
        encode_manifest(manifest)


GOLDEN = (
    "475250494f52454301000100b801000052040000000000007f72ca92912bd9c5eeda4e447f90986869e6d0d175b7"
    "d98fad995f32379f7c5beb3a42072710ad01dc0013d9203030313132323333343435353636373738383939616162"
    "626363646465656666a36a6f620105000202c420000102030405060708090a0b0c0d0e0f10111213141516171819"
    "1a1b1c1d1e1fc420202122232425262728292a2b2c2d2e2f303132333435363738393a3b3c3d3e3fa27731cb3ff8"
    "000000000000443acd5000c41d016d0273046c6f737364000000000000e03f730374616774027301614e91a57374"
    "65702a03029794367d01c420ca948b704a06c992eaedea565bea0fb3fcb79be325509f5d78bd5766d7cdc97e9460"
    "6000c420d738cb51c267cf2a61cb18d319b8de71d80b85478e449f0390fc0f02f99a92f8940f1802c420b50aed43"
    "9a3aac0fdd7ff07b77ff28bfca5ac825799764c994ca9b034ef5497c940c0c00c420f599052f3420e02c499f8a58"
    "2fe7ee597f2e53f31c6f34c424322b9b280b7219940f1802c4209ac3d482474ffcf97830bc2b63846a47125cc576"
    "3c83790c4b020a3fd6fbf01194184002c42088a9a0e26e49cf10d43ad0dada75c01dd7254bdddc94b7b185af3fbb"
    "6763904e94cc9bcc9b00c4206005a508a7d9fef78abbf0c63a8e51358bb19f233d7ea18bea614919ffbe62797801"
    "9b34e5a6998f010418eaba4259c894a9ae2384ab9b979f926aa00be2e815a7a69f0d6038cc4050b7092edd0a0c87"
    "9801ad961f482d3adedff11b61f14c886e35afa036736dcd87a74d27b5c1510225d0f592e21348fc721fbbc172e0"
    "925fa27af1671de225ba927134802998b10a1568a188652bab13bedf42e84bae0f7c62c7dd6a8ada571e8829bed6"
    "ea558217f0361b5e25d07801e36280003e280da30001e80019010000000000000000000000780163106040010e50"
    "1e00038800517801636080004628fd1f0a9870f0e5a1e2300a0048be101594946bccaf01c420fe960e184651f4b6"
    "cd50e6f06852ea87559836e41138f6126e35e6142ad38e8394080800c4205ffb5f9af2f29caca818577e63bf6615"
    "41053c8d2caaaeb479be74a7a152b01c946cccaf01c4201fbd195b7693e21b95bf54d79dc563faf5ac750e6452c2"
    "79e8d51b55eac5031d94080800c420b385b9ffa3092ec5de8720e0e4d17273f153a9475420a0907c16eb49619acf"
    "49780173f70c7162646060600662262016816209200d025c100a4e83d48000483d08388049041fca8553ffa10064"
    "071b030bd81c26a04d8c401380663001598c4033cb5333d3334a8a4b520b405821313d31332f2d273fb1c4d888a1"
    "24bf28398381a12007280600c08618b80000000001000000780173f70c7162646060600662262016816209200d02"
    "5c100a4e83d48000483d08388049041f260f1566f80f05203bd81858c0e630016d62049a00348309c86204ea294f"
    "cd4ccf28292e492d006185c4f4c4ccbcb49cfcc41263238692fca2e40c0686821ca01800c14418ba000000000200"
    "0000"
)


def test_readers_share_equal_item_tables_and_verify_each() -> None:
    data, shared = encode_manifest(sample_manifest()), SharedTables()
    first = ManifestReader(reads(data), len(data), PATH, shared)
    first.verify_structure()
    again = ManifestReader(reads(data), len(data), PATH, shared)
    again.verify_structure()
    assert encode_manifest(again.manifest()) == data
    assert again.member(0).items is first.member(0).items
    torn = bytearray(data)
    section = next(iter(shared.tables))
    table = next(
        at
        for at in range(len(data))
        if blake3(data[at : at + section.stored]).digest() == section.digest
    )
    torn[table] ^= 1
    with pytest.raises(IntegrityError, match="item table"):
        ManifestReader(reads(bytes(torn)), len(data), PATH, shared).manifest()
