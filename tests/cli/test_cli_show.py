"""``ls`` and ``show``: what is committed, and what is in it."""

from __future__ import annotations

import io
import json

import pytest
from cli_help import Command
from store_maker import StoreMaker, state

from groupio.cli.output import LazyArray, emit_json
from groupio.model import DecisionKey


def test_ls_lists_committed_epochs_only(groupio: Command, maker: StoreMaker) -> None:
    maker.abort(DecisionKey(1, 30, 1))
    done = groupio("ls", maker.path, "--json")
    assert done.code == 0
    assert done.json["schema"] == "groupio/ls/1"
    assert done.json["latest"] == 20
    assert done.json["store"]["job"] == "job"
    assert [e["epoch"] for e in done.json["epochs"]] == [10, 20]
    first, second = done.json["epochs"]
    assert first["members"] == 2
    assert first["metadata"] == {"note": "first"}
    assert first["bytes_logical"] > first["bytes_unique"]
    assert second["bytes_stored"] < first["bytes_stored"]

    text = groupio("ls", maker.path)
    assert text.code == 0
    assert "first" in text.out
    assert "2.0 MiB" not in text.err


def test_ls_marks_what_a_rewind_abandoned(groupio: Command, maker: StoreMaker) -> None:
    maker.rewind(2, parent=1, after=10)
    maker.commit(15, [state(0, 15)], lineage=2, incarnation=2)
    done = groupio("ls", maker.path, "--json")
    assert {e["epoch"]: e["abandoned"] for e in done.json["epochs"]} == {
        10: False,
        15: False,
        20: True,
    }
    assert done.json["latest"] == 15
    assert "abandoned by a rewind" in groupio("ls", maker.path).out
    assert groupio("show", maker.path, "20", "--json").json["epoch"]["abandoned"] is True
    assert groupio("show", maker.path, "latest", "--json").json["epoch"]["epoch"] == 15
    old = groupio("show", maker.path, "latest", "--lineage", "1", "--json")
    assert old.json["epoch"]["epoch"] == 20


def test_ls_says_no_when_a_record_is_damaged(groupio: Command, maker: StoreMaker) -> None:
    path = maker.path / "epochs" / str(DecisionKey(1, 20, 1))
    path.write_bytes(path.read_bytes()[:-1])
    done = groupio("ls", maker.path, "--json")
    assert done.code == 1
    assert [e["epoch"] for e in done.json["epochs"]] == [10]
    assert [d["path"] for d in done.json["damaged"]] == [str(path)]
    assert "damaged" in groupio("ls", maker.path).out


def test_ls_of_a_new_store(groupio: Command, tmp_path_factory: pytest.TempPathFactory) -> None:
    made = StoreMaker(tmp_path_factory.mktemp("new") / "store")
    try:
        done = groupio("ls", made.path)
        assert done.code == 0
        assert "no epoch is committed yet" in done.out
        assert groupio("ls", made.path, "--json").json["latest"] is None
        assert groupio("show", made.path, "latest").code == 2
    finally:
        made.close()


def test_show_describes_members_items_and_segments(groupio: Command, maker: StoreMaker) -> None:
    done = groupio("show", maker.path, "20", "--json")
    assert done.code == 0
    assert [m["rank"] for m in done.json["members"]] == [0, 1]
    (table,) = done.json["tables"]
    assert table["ranks"] == [0, 1]
    items = {item["name"]: item for item in table["items"]}
    assert items["embedding"]["shape"] == [1024, 512]
    assert items["half"]["dtype"] == "bfloat16"
    assert items["step"]["kind"] == "plain"
    assert sorted(s["own"] for s in done.json["segments"]) == [False, True]

    text = groupio("show", maker.path, "20").out
    assert "rank 0-1: 11 items" in text
    assert "1024x512" in text
    assert "../../escape" in text

    one = groupio("show", maker.path, "latest", "--member", "1", "--json").json
    assert [m["rank"] for m in one["members"]] == [1]
    assert one["tables"][0]["ranks"] == [1]


def test_show_shortens_long_tables(groupio: Command, maker: StoreMaker) -> None:
    maker.commit(30, [{f"item {i} [bold]": i for i in range(60)}])
    short = groupio("show", maker.path, "30").out
    assert "and 20 more (--all)" in short
    assert "item 0 [bold]" in short
    assert "item 59 [bold]" in groupio("show", maker.path, "30", "--all").out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["show", "STORE", "11"], "epoch 11 is not committed in this store; there is 10, 20"),
        (["show", "STORE", "newest"], "'newest' is not an epoch"),
        (["show", "STORE", "-1"], "-1"),
        (["show", "STORE", "20", "--member", "2"], "no member 2"),
        (["show", "STORE", "20", "--lineage", "7"], "not committed"),
        (["ls", "STORE/absent"], "there is no store at"),
        (["ls", "STORE/segments"], "not a groupio store"),
        (["ls", "STORE/groupio.json"], "groupio.json"),
        (["ls", "s3://bucket/store"], "s3"),
        (["ls"], "STORE"),
        (["ls", "STORE", "--nonsense"], "--nonsense"),
        (["nonsense"], "nonsense"),
    ],
)
def test_what_is_wrong_with_the_call_is_one_line_and_exit_code_2(
    groupio: Command, maker: StoreMaker, arguments: list[str], words: str
) -> None:
    done = groupio(*(a.replace("STORE", str(maker.path)) for a in arguments))
    assert done.code == 2
    assert done.out == ""
    assert len(done.err.splitlines()) == 1
    assert done.err.startswith("groupio: ")
    assert words in done.err


def test_help_and_version(groupio: Command) -> None:
    assert groupio("--version").out.startswith("groupio ")
    assert "verify" in groupio().out
    assert "drain" in groupio("agent", "--help").out
    for command in ("ls", "show", "verify", "export", "status", "doctor"):
        done = groupio(command, "--help")
        assert done.code == 0
        assert "--json" in done.out


def test_json_is_written_piece_by_piece_and_reads_as_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    writes: list[str] = []

    class Out(io.StringIO):
        def write(self, text: str) -> int:
            writes.append(text)
            return len(text)

    body = {"none": LazyArray(0, lambda: iter(())), "rows": [{"n": 1}]}
    made = LazyArray(100_000, lambda: ({"n": number} for number in range(100_000)))
    monkeypatch.setattr("sys.stdout", Out())
    emit_json("show", body | {"many": made})
    whole = {"schema": "groupio/show/1", "none": [], "rows": [{"n": 1}]}
    whole["many"] = [{"n": number} for number in range(100_000)]
    assert "".join(writes) == json.dumps(whole, indent=2) + "\n"
    assert max(map(len, writes)) < 1 << 18
