"""``verify`` checks doors too: their damage is theirs alone, and never that of an epoch."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from cli_help import Command
from store_maker import StoreMaker

from groupio.door.record import decode_record, encode_record, read_record
from groupio.errors import FormatError, IntegrityError, InvalidInput

VALUES, METADATA, RECORD = "__values.bin", ".metadata", "groupio.json"


@pytest.fixture
def door(groupio: Command, maker: StoreMaker) -> Path:
    """The door of epoch 20; 10 has one as well."""
    for epoch in (10, 20):
        assert groupio("export", maker.path, "--dcp", "--epoch", epoch).code == 0
    return maker.path / "dcp" / "20"


def flip(path: Path, at: int = -9) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 4
    path.write_bytes(data)


def only_damage(groupio: Command, maker: StoreMaker, *more: object) -> dict[str, Any]:
    done = groupio("verify", maker.path, "--json", *more)
    assert done.code == 1
    assert done.json["ok"] is False
    assert done.json["epochs"] == [10, 20], "an epoch is not hurt by its door"
    (damage,) = done.json["damage"]
    assert damage["epochs"] == []
    assert damage["chunk"] is None
    return dict(damage)


def test_sound_doors_are_counted(groupio: Command, maker: StoreMaker, door: Path) -> None:
    done = groupio("verify", maker.path, "--json")
    assert done.code == 0
    assert done.json["doors"] == 2
    assert "2 doors" in groupio("verify", maker.path).out
    assert groupio("verify", maker.path, "20", "--json").json["doors"] == 1


@pytest.mark.parametrize("file", [VALUES, METADATA])
def test_a_flipped_bit_is_found_and_mended_as_the_advice_says(
    groupio: Command, maker: StoreMaker, door: Path, file: str
) -> None:
    flip(door / file)
    damage = only_damage(groupio, maker)
    assert (damage["kind"], damage["path"]) == ("corrupt", str(door / file))
    advice = damage["detail"].partition("groupio export ")[2]
    assert groupio("verify", maker.path, "10").code == 0, "the door of 10 is sound"
    assert only_damage(groupio, maker)["detail"] in groupio("verify", maker.path).out
    assert groupio("export", *advice.split()).code == 0
    assert groupio("verify", maker.path).code == 0


def test_missing_cut_and_grown_files(groupio: Command, maker: StoreMaker, door: Path) -> None:
    values = door / VALUES
    whole = values.read_bytes()
    values.write_bytes(whole[:-1])
    assert only_damage(groupio, maker)["kind"] == "truncated"
    values.write_bytes(whole + b"x")
    assert only_damage(groupio, maker)["kind"] == "corrupt"
    values.unlink()
    assert only_damage(groupio, maker)["kind"] == "missing"
    values.mkdir()
    assert only_damage(groupio, maker)["kind"] == "unreadable"


@pytest.mark.parametrize(
    ("record", "kind"),
    [(None, "missing"), (b"{", "corrupt"), (b"[]", "corrupt"), (b'{"files": {}}', "corrupt")],
)
def test_the_record_of_a_door(
    groupio: Command, maker: StoreMaker, door: Path, record: bytes | None, kind: str
) -> None:
    if record is None:
        (door / RECORD).unlink()
    else:
        (door / RECORD).write_bytes(record)
    damage = only_damage(groupio, maker)
    assert (damage["kind"], damage["path"]) == (kind, str(door / RECORD))


def test_the_door_of_another_write(groupio: Command, maker: StoreMaker, door: Path) -> None:
    record = decode_record((door / RECORD).read_bytes(), RECORD)
    other = encode_record(record.key, "of an abandoned line", record.files)
    (door / RECORD).write_bytes(other)
    damage = only_damage(groupio, maker)
    assert (damage["kind"], damage["path"]) == ("swapped", str(door))
    assert "another write of epoch 20" in damage["detail"]


def test_a_flipped_bit_of_the_record_is_found(
    groupio: Command, maker: StoreMaker, door: Path
) -> None:
    whole = (door / RECORD).read_bytes()
    for at in range(0, len(whole), 7):
        data = bytearray(whole)
        data[at] ^= 1 << at % 8
        (door / RECORD).write_bytes(data)
        with pytest.raises((IntegrityError, FormatError)):
            decode_record(bytes(data), RECORD)
        with maker.backend.doors() as doors, pytest.raises((IntegrityError, FormatError)):
            read_record(doors, "20")
    damage = only_damage(groupio, maker)
    assert (damage["kind"], damage["path"]) == ("corrupt", str(door / RECORD))


def test_a_door_of_an_earlier_release_is_valid(
    groupio: Command, maker: StoreMaker, door: Path
) -> None:
    record = json.loads((door / RECORD).read_text())
    del record["check"]
    old = json.dumps(record | {"schema": "groupio/door/1"}, indent=1)
    (door / RECORD).write_text(old)
    done = groupio("verify", maker.path, "--json")
    assert done.code == 0
    (note,) = done.json["leftovers"]
    assert (note["state"], note["path"]) == ("unsealed", str(door / RECORD))
    assert "no digest" in groupio("verify", maker.path).out
    assert [row["door"] for row in groupio("ls", maker.path, "--json").json["epochs"]] == [
        "dcp",
        "dcp",
    ]
    advice = note["detail"].partition("groupio export ")[2]
    assert groupio("export", *advice.split()).code == 0
    assert groupio("verify", maker.path, "--json").json["leftovers"] == []


@pytest.mark.parametrize(
    "change",
    [
        {"files": {"../../groupio.json": {"bytes": 1, "blake3": "0" * 64}}},
        {"files": {".metadata": {"bytes": 1, "blake3": "0" * 64}, "a\0b": None}},
        {"files": {"__values.bin": {"bytes": 1, "blake3": "0" * 64}}},
        {"files": {".metadata": {"bytes": -1, "blake3": "0" * 64}}},
        {"files": {".metadata": {"bytes": 1, "blake3": "zz"}}},
        {"schema": "groupio/door/3"},
        {"schema": "groupio/door/1", "check": "0" * 64},
        {"more": 1},
    ],
)
def test_records_that_no_release_makes(door: Path, change: dict[str, Any]) -> None:
    record = json.loads((door / RECORD).read_text())
    with pytest.raises((IntegrityError, FormatError)):
        decode_record(json.dumps(record | change).encode(), RECORD)


def test_a_record_that_could_not_be_read_is_not_made() -> None:
    with pytest.raises(InvalidInput, match="does not list"):
        encode_record("key", "write", {})


def test_doors_that_belong_to_no_epoch(groupio: Command, maker: StoreMaker, door: Path) -> None:
    shutil.copytree(door, door.with_name("30"))
    damage = only_damage(groupio, maker)
    assert damage["path"] == str(door.with_name("30"))
    assert "not committed" in damage["detail"]
    assert "remove it" in damage["detail"]
    shutil.rmtree(door.with_name("30"))
    for name in ("020", "mine", ".20.tmp-0123"):
        door.with_name(name).mkdir()
    done = groupio("verify", maker.path, "--json")
    assert done.code == 0
    states = {Path(row["path"]).name: row["state"] for row in done.json["leftovers"]}
    assert states == {"020": "garbage", "mine": "garbage", ".20.tmp-0123": "garbage"}
    assert groupio("verify", maker.path, "20", "--json").json["leftovers"] == []


def test_the_door_of_an_unreadable_epoch(groupio: Command, maker: StoreMaker, door: Path) -> None:
    (record,) = (maker.path / "epochs").glob("*E*20-*")
    flip(record, 200)
    flip(door / VALUES)
    done = groupio("verify", maker.path, "--json")
    found = {(Path(row["path"]).name, row["kind"]) for row in done.json["damage"]}
    assert (VALUES, "corrupt") in found
    assert "dcp" not in {name for name, _ in found}, "it is not known to be of another write"


def test_a_file_where_the_doors_should_be(groupio: Command, maker: StoreMaker) -> None:
    (maker.path / "dcp").write_text("mine")
    damage = only_damage(groupio, maker)
    assert (damage["kind"], damage["path"]) == ("unreadable", str(maker.path / "dcp"))


def test_a_checkpoint_of_torch_is_no_store(
    groupio: Command, maker: StoreMaker, door: Path, tmp_path: Path
) -> None:
    for command in (["ls"], ["verify"], ["show"], ["export", "--dcp"]):
        epoch = ["20"] if command == ["show"] else []
        done = groupio(command[0], door, *epoch, *command[1:])
        assert (done.code, done.err.count("\n")) == (2, 1)
        assert f"give the store {maker.path} and the epoch 20" in done.err
    (tmp_path / "stock").mkdir()
    (tmp_path / "stock" / METADATA).write_bytes(b"of torch")
    done = groupio("ls", tmp_path / "stock")
    assert done.code == 2
    assert "to import it" in done.err
