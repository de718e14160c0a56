"""``export`` writes what was saved, bit for bit, as files that other tools read."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors
from blake3 import blake3
from cli_help import Command
from store_maker import StoreMaker, state

from groupio.cli.plainjson import to_json
from groupio.model import DecisionKey


def read_safetensors(path: Path) -> dict[str, Any]:
    """Name to (dtype, shape, bytes), by the library's own parser."""
    return {
        name: (about["dtype"], tuple(about["shape"]), bytes(about["data"]))
        for name, about in safetensors.deserialize(path.read_bytes())
    }


def test_everything_comes_out_as_it_went_in(
    groupio: Command, maker: StoreMaker, tmp_path: Path
) -> None:
    to = tmp_path / "out"
    done = groupio("export", maker.path, "20", "--to", to, "--json")
    assert (done.code, done.json["members"]) == (0, [0, 1])
    assert sorted(p.name for p in to.iterdir()) == ["index.json", "rank-00000", "rank-00001"]
    index = json.loads((to / "index.json").read_text())
    assert index["epoch"]["epoch"] == 20
    for member in index["members"]:
        folder, saved = to / member["folder"], state(member["rank"], 20)
        assert [row["name"] for row in member["items"]] == list(saved)
        tensors = read_safetensors(folder / "tensors.safetensors")
        assert sorted(tensors) == [
            "../../escape", "embedding", "half", "nothing", "own", "tiny",
        ]  # fmt: skip
        assert tensors["half"] == ("BF16", (7,), saved["half"].tobytes())
        assert tensors["tiny"] == ("F8_E4M3", (5,), saved["tiny"].tobytes())
        for row in member["items"]:
            value, path = saved[row["name"]], folder / row["file"]
            assert path.resolve().parent == folder.resolve()
            if row["kind"] == "plain":
                assert json.loads(path.read_text()) == to_json(value)
                continue
            data = value if isinstance(value, bytes) else value.tobytes()
            stored = tensors[row["name"]][2] if path.suffix == ".safetensors" else path.read_bytes()
            assert stored == data
            assert row["blake3"] == blake3(data).hexdigest()


def test_safetensors_are_aligned(groupio: Command, maker: StoreMaker, tmp_path: Path) -> None:
    groupio("export", maker.path, "20", "--to", tmp_path / "out")
    data = (tmp_path / "out/rank-00000/tensors.safetensors").read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    assert (8 + length) % 8 == 0
    assert header["__metadata__"]["groupio_epoch"] == "20"
    sizes = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "BF16": 2, "F8_E4M3": 1}
    for name, about in header.items():
        if name != "__metadata__":
            assert about["data_offsets"][0] % sizes[about["dtype"]] == 0


def test_one_member_alone(groupio: Command, maker: StoreMaker, tmp_path: Path) -> None:
    to = tmp_path / "deep" / "out"
    assert groupio("export", maker.path, "latest", "--to", to, "--member", "1").code == 0
    assert sorted(p.name for p in to.iterdir()) == ["index.json", "rank-00001"]
    again = groupio("export", maker.path, "latest", "--to", to)
    assert again.code == 2
    assert "is not empty" in again.err
    missing = groupio("export", maker.path, "latest", "--to", tmp_path / "x", "--member", "9")
    assert missing.code == 2
    assert not (tmp_path / "x").exists()
    file = tmp_path / "file"
    file.write_text("")
    assert "not a directory" in groupio("export", maker.path, "20", "--to", file).err


def test_damage_ends_the_export_without_an_index(
    groupio: Command, maker: StoreMaker, tmp_path: Path
) -> None:
    path = maker.path / "segments" / f"{DecisionKey(1, 10, 1)}-node-0000.seg"
    data = bytearray(path.read_bytes())
    data[5000] ^= 1
    path.write_bytes(data)
    done = groupio("export", maker.path, "10", "--to", tmp_path / "out")
    assert done.code == 1
    assert len(done.err.splitlines()) == 1
    assert path.name in done.err
    assert not (tmp_path / "out/index.json").exists()


def test_a_full_disk_is_told_before_bytes_are_written(
    groupio: Command, maker: StoreMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(fd: int, offset: int, length: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", full)
    done = groupio("export", maker.path, "10", "--to", tmp_path / "out")
    assert done.code == 2
    assert "No space left" in done.err


def test_plain_values_keep_their_types_in_json() -> None:
    array = np.array([[1, 2], [3, 4]], ">i2")
    assert to_json(None) is None
    assert to_json([True, 1, 1.5, "x"]) == [True, 1, 1.5, "x"]
    assert to_json((1, (2,))) == {"$tuple": [1, {"$tuple": [2]}]}
    assert to_json(float("-inf")) == {"$float": "-inf"}
    assert to_json(complex(0, float("nan"))) == {"$complex": [0.0, {"$float": "nan"}]}
    assert to_json(b"\xff") == {"$bytes": "/w=="}
    assert to_json({"a": 1}) == {"a": 1}
    assert to_json({"$a": 1}) == {"$dict": [["$a", 1]]}
    assert to_json({1: (2,)}) == {"$dict": [[1, {"$tuple": [2]}]]}
    made = to_json(array)["$array"]
    assert made["shape"] == [2, 2]
    assert np.frombuffer(base64.b64decode(made["base64"]), "<i2").tolist() == [1, 2, 3, 4]
    assert to_json(np.float32(1.5))["$array"]["shape"] == []
    assert to_json(ml_dtypes.bfloat16(1))["$array"]["dtype"] == "bfloat16"


def test_door_for_torch(groupio: Command, maker: StoreMaker) -> None:
    done = groupio("export", maker.path, "--dcp", "--json")
    latest = groupio("ls", maker.path, "--json").json["latest"]
    door = Path(maker.path, "dcp", str(latest))
    assert (done.code, done.json["door"], done.json["epoch"]) == (0, str(door), latest)
    files = {path.name: path.stat().st_size for path in door.iterdir()}
    assert (done.json["files"], done.json["bytes"]) == (len(files), sum(files.values()))
    assert {".metadata", "groupio.json", "__values.bin"} <= set(files)
    listed = groupio("ls", maker.path, "--json").json["epochs"]
    assert [row["door"] for row in listed] == [None] * (len(listed) - 1) + ["dcp"]
    assert str(door) in groupio("show", maker.path, "latest").out.replace("\n", "")
    again = groupio("export", maker.path, "--dcp", "--epoch", str(latest))
    assert again.code == 0
    assert f"epoch {latest}" in again.out
    (door / ".metadata").write_bytes(b"")
    assert groupio("show", maker.path, "latest", "--json").json["epoch"]["door"] is None


def test_door_of_an_epoch_that_another_line_has_too(groupio: Command, maker: StoreMaker) -> None:
    maker.rewind(2, parent=1, after=10)
    maker.commit(20, [state(0, 20)], lineage=2, incarnation=2)
    refused = groupio("export", maker.path, "20", "--dcp", "--lineage", "1")
    assert refused.code == 2
    assert "lineage 2" in refused.err
    assert groupio("export", maker.path, "20", "--dcp").code == 0


def test_wrong_options_of_export(groupio: Command, maker: StoreMaker, tmp_path: Path) -> None:
    for options, words in (
        ((), "--to"),
        (("20",), "--to"),
        (("--to", tmp_path / "x"), "EPOCH"),
        (("20", "--epoch", "20", "--dcp"), "once"),
        (("20", "--dcp", "--to", tmp_path / "x"), "--to"),
        (("20", "--dcp", "--member", "0"), "--member"),
        (("77", "--dcp"), "77"),
    ):
        done = groupio("export", maker.path, *options)
        assert done.code != 0
        assert words in done.err, options
    assert not (tmp_path / "x").exists()


def test_door_of_a_damaged_epoch(groupio: Command, maker: StoreMaker) -> None:
    segment = next(Path(maker.path, "segments").iterdir())
    data = bytearray(segment.read_bytes())
    data[4096] ^= 1
    segment.write_bytes(data)
    done = groupio("export", maker.path, "latest", "--dcp")
    assert done.code == 1
    assert "damaged" in done.err
    assert not Path(maker.path, "dcp").exists() or not list(Path(maker.path, "dcp").iterdir())
