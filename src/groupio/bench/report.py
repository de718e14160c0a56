"""The report: one HTML file without anything from outside, for light and dark screens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from groupio.bench.charts import Bar, Mark, Row, bar_chart
from groupio.bench.ratios import Gate, Summary
from groupio.bench.records import Record

LEVELS = (
    ("stall", "stall_s"),
    ("staged", "staged_s"),
    ("remote", "remote_s"),
    ("durable", "durable_s"),
    ("door", "door_s"),
)
_PROMISE = {
    "stall": "the caller may overwrite its tensors",
    "staged": "in host memory for every rank",
    "remote": "accepted off the compute nodes, or durable",
    "durable": "the system says that it is done",
    "door": "torch.distributed.checkpoint can read it, too",
    "load": "every tensor has its bytes on every rank",
}
_SHAPES = {
    "fsdp": "all ranks differ, everything changes in each epoch",
    "ddp": "all ranks are equal, everything changes in each epoch",
    "lora": "all ranks differ, 2 % of the bytes change in each epoch",
    "tiny": "20,000 tensors of 64 bytes, equal on all ranks",
}


def page(records: Sequence[Record], command: str, gates: Sequence[Gate]) -> str:
    """The whole page. ``records`` are those of one run of ``command``."""
    first = records[0]
    titles = {"save": "Saving", "load": "Loading", "step": "Training and saving"}
    parts = [
        f"<h1>{titles[command]}, beside the peers and the limits</h1>",
        _lead(records, command),
    ]
    for shape in dict.fromkeys(r["shape"] for r in records):
        for cold in (True, False) if command == "load" else (None,):
            summary = Summary(shape, records, cold=cold)
            word = {True: ", cold", False: ", warm", None: ""}[cold]
            parts.append(f"<h2>{escape(shape + word)}</h2>")
            parts.append(f"<p>{_SHAPES[shape].capitalize()}. {_sizes(summary)}</p>")
            parts.append(_SECTIONS[command](summary))
    parts += ["<h2>Targets</h2>", _gate_table(gates)]
    parts += ["<h2>What the systems mean by done</h2>", _notes(records)]
    parts += ["<h2>Conditions</h2>", _conditions(first["conditions"])]
    body = "\n".join(parts)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>groupio bench {escape(command)}</title>\n<style>{_STYLE}</style>\n</head>\n"
        f"<body>\n<main>\n{body}\n</main>\n</body>\n</html>\n"
    )


def _lead(records: Sequence[Record], command: str) -> str:
    epochs = len({r["epoch"] for r in records})
    what = {"save": "epochs", "load": "repetitions", "step": "steps"}[command]
    loaders = f" saved, {records[0]['load_ranks']} load" if command == "load" else ""
    levels = ("load",) if command == "load" else tuple(name for name, _ in LEVELS)
    legend = "".join(
        f'<span class="key"><i class="{level}"></i><b>{level}</b> {_PROMISE[level]}</span>'
        for level in (levels if command != "step" else ())
    )
    if command != "step":
        legend += '<span class="key"><i class="limit"></i><b>limit</b> of the same machine</span>'
    return (
        f"<p>{records[0]['ranks']} ranks{loaders}. Medians of {epochs} {what}, the first "
        "left out; every time is the slowest rank's from a common start. All systems took turns in "
        "one run.</p>"
        f'<p class="legend">{legend}</p>'
    )


def _sizes(summary: Summary) -> str:
    row = next(iter(summary.counted), None)
    if row is None:
        return ""
    word = "unique" if "load_s" in row else "new"
    unique = f", {_mb(row['bytes_unique'])} of them {word}" if row["bytes_unique"] else ""
    return f"{_mb(row['bytes_logical'])} passed by all ranks{unique}."


def _save_section(summary: Summary) -> str:
    rows, ours = [], summary.medians["groupio"]
    for name, row in summary.medians.items():
        bars = [Bar(label, label, row[key]) for label, key in LEVELS if row[key] is not None]
        if row["stall_s"] == row["durable_s"]:
            bars = [bar for bar in bars if bar.kind == "durable"]  # the caller waits for all
        rows.append(Row(name, bars))
    marks = [
        Mark("stall", "memcpy", ours["limit_stall_s"] or 0.0),
        Mark("durable", "raw write", ours["limit_durable_s"] or 0.0),
    ]
    chart = bar_chart(f"Seconds by system, {summary.shape}", rows, [m for m in marks if m.value])
    head = ["system", "first stall", "stall / limit", "durable / limit", "durable / dcp"]
    head += ["stall / dcp_async", "stored / unique"]
    table = []
    for name in summary.medians:
        table.append(
            (
                name,
                _s(summary.first[name]["stall_s"]),
                _r(summary.ratio(name, "stall_s", "", "limit_stall_s")),
                _r(summary.ratio(name, "durable_s", "", "limit_durable_s")),
                _r(summary.ratio(name, "durable_s", "dcp")),
                _r(summary.ratio(name, "stall_s", "dcp_async")),
                _r(summary.ratio(name, "bytes_stored", "", "bytes_unique"), 3),
            )
        )
    return f'<div class="chart">{chart}</div>{_table(head, table)}'


def _load_section(summary: Summary) -> str:
    rows = [
        Row(name, [Bar("load", "load", row["load_s"])]) for name, row in summary.medians.items()
    ]
    limit = summary.medians.get("groupio", {}).get("limit_load_s")
    marks = [Mark("durable", "raw read + copy", limit)] if limit else []
    chart = bar_chart(f"Seconds to load, {summary.shape}", rows, marks)
    head = ("system", "load", "load / limit", "load / dcp", "read", "read / unique")
    table = [
        (
            name,
            _s(row["load_s"]),
            _r(summary.ratio(name, "load_s", "", "limit_load_s")),
            _r(summary.ratio(name, "load_s", "dcp")),
            "-" if row["bytes_read"] is None else _mb(row["bytes_read"]),
            _r(summary.ratio(name, "bytes_read", "", "bytes_unique"), 3),
        )
        for name, row in summary.medians.items()
    ]
    return f'<div class="chart">{chart}</div>{_table(head, table)}'


def _step_section(summary: Summary) -> str:
    rows = [
        Row(name, [Bar("durable", "step", row["step_s"])]) for name, row in summary.medians.items()
    ]
    chart = bar_chart("Seconds of one training step", rows, [])
    head = ("saving with", "step", "against none")
    table = [
        (name, _s(row["step_s"]), _r(summary.ratio(name, "step_s", "none"), 3))
        for name, row in summary.medians.items()
    ]
    return f'<div class="chart">{chart}</div>{_table(head, table)}'


_SECTIONS = {"save": _save_section, "load": _load_section, "step": _step_section}


def _gate_table(gates: Sequence[Gate]) -> str:
    rows = []
    for gate in gates:
        verdict = "reached" if gate.passed else "missed"
        if gate.value is None:
            verdict = gate.why or "not measured"
        mark = {"reached": "good", "missed": "bad"}.get(verdict, "")
        rows.append(
            f"<tr><td>{escape(gate.shape)}</td><td>{escape(gate.what)}</td>"
            f"<td>{_r(gate.value, 3)}</td><td>≤ {gate.target:.3g}</td>"
            f'<td class="{mark}">{escape(verdict)}</td></tr>'
        )
    head = "".join(f"<th>{word}</th>" for word in ("shape", "ratio", "value", "target", ""))
    return (
        f'<div class="wide"><table class="gates"><thead><tr>{head}</tr></thead><tbody>'
        f"{''.join(rows)}</tbody></table></div>"
    )


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    top = "".join(f"<th>{escape(word)}</th>" for word in head)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    return (
        f'<div class="wide"><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'
    )


def _notes(records: Sequence[Record]) -> str:
    notes = {}
    for record in records:
        if record["note"]:
            notes[record["system"]] = record["note"]
    words = "".join(f"<dt>{escape(n)}</dt><dd>{escape(note)}</dd>" for n, note in notes.items())
    return f"<dl>{words}</dl>"


def _conditions(found: dict[str, Any]) -> str:
    packages = ", ".join(f"{name} {version}" for name, version in found["packages"].items())
    facts = {
        "machine": f"{found['cpus']} CPUs ({found['cpu']}), {_mb(found['memory_bytes'])} of memory",
        "load before": str(found["load_before"]),
        "file system": found["file_system"],
        "kernel": found["kernel"],
        "versions": f"Python {found['python']}, {packages}",
        "date": found["date"],
        "command": found["command"],
    }
    words = "".join(f"<dt>{k}</dt><dd>{escape(str(v))}</dd>" for k, v in facts.items())
    return f"<dl>{words}</dl>"


def _s(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value * 1e3:.1f} ms" if value < 1 else f"{value:.2f} s"


def _r(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _mb(nbytes: float) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("KB", 1e3)):
        if nbytes >= size:
            return f"{nbytes / size:.3g} {unit}"
    return f"{nbytes:.0f} B"


_STYLE = """
:root{color-scheme:light dark;--bg:#fbfbfa;--fg:#1d2126;--dim:#626b75;--line:#dfe2e6;
--stall:#d9822b;--staged:#5b8def;--durable:#2a8f74;--remote:#8f7fd6;--door:#9aa3ab;
--mark:#b3261e;--good:#1b7f4b;--bad:#b3261e}
@media(prefers-color-scheme:dark){:root{--bg:#14171a;--fg:#e7eaed;--dim:#9aa4ae;--line:#2d3339;
--stall:#eba45c;--staged:#82aaff;--durable:#55c2a2;--remote:#b6a8f5;--door:#717b84;
--mark:#ff8a80;--good:#6ddb9d;--bad:#ff8a80}}
body{margin:0;background:var(--bg);color:var(--fg);font:15px/1.5 system-ui,sans-serif}
main{max-width:920px;margin:0 auto;padding:28px 20px 60px}
h1{font-size:25px;margin:0 0 8px;letter-spacing:-.01em}
h2{font-size:18px;margin:38px 0 4px}
p{margin:4px 0 10px;color:var(--dim)}
.legend{display:flex;flex-wrap:wrap;gap:6px 22px}
.key i{display:inline-block;width:12px;height:12px;border-radius:2px;margin-right:7px;
vertical-align:-1px}
.key b{color:var(--fg);font-weight:600}
i.stall{background:var(--stall)}i.staged{background:var(--staged)}
i.durable,i.load{background:var(--durable)}
i.limit{width:0;border-left:2px dashed var(--mark);border-radius:0;height:13px}
svg{width:100%;height:auto;font:12px system-ui,sans-serif}
svg text{fill:var(--fg);paint-order:stroke;stroke:var(--bg);stroke-width:4px;
stroke-linejoin:round}
svg .tick,svg .none{fill:var(--dim)}
svg .system{font-weight:600;font-size:13px}svg .value{font-size:11.5px}
svg .limit{fill:var(--mark);font-size:11.5px}
.grid{stroke:var(--line)}
.mark{stroke:var(--mark);stroke-width:1.5;stroke-dasharray:5 4}
rect.stall{fill:var(--stall)}rect.staged{fill:var(--staged)}
rect.durable,rect.load{fill:var(--durable)}
i.remote{background:var(--remote)}rect.remote{fill:var(--remote)}
i.door{background:var(--door)}rect.door{fill:var(--door)}
.wide{overflow-x:auto}
table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums;margin-top:6px}
th,td{padding:5px 10px;border-bottom:1px solid var(--line);text-align:right;white-space:nowrap}
th{color:var(--dim);font-weight:500;font-size:13px}
th:first-child,td:first-child{text-align:left;padding-left:0}
.gates th:nth-child(2),.gates td:nth-child(2),.gates th:last-child,.gates td:last-child
{text-align:left}
.good{color:var(--good);font-weight:600}.bad{color:var(--bad);font-weight:600}
dl{display:grid;grid-template-columns:max-content 1fr;gap:5px 18px;margin:8px 0}
dt{color:var(--dim)}dd{margin:0;overflow-wrap:anywhere}
"""
