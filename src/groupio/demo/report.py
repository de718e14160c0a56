"""The HTML report: one file without outside parts, for light and dark screens."""

from __future__ import annotations

import platform
from html import escape
from pathlib import Path

import groupio
from groupio.demo import figures
from groupio.demo.charts import loss_chart, timeline_chart
from groupio.demo.figures import LEVELS, SaveFigures
from groupio.demo.run import Result
from groupio.demo.table import bytes_text, seconds_text

RUNS = ("control", "interrupted", "resumed")

STYLE = """
:root { --ink: #1c2330; --soft: #5a6577; --paper: #ffffff; --rule: #d8dee8; --good: #14804a;
  --bad: #c62f2f; --c0: #2f6fde; --c1: #27a6a4; --c2: #e0a021; --c3: #7a4fd0; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6eaf2; --soft: #9aa6ba; --paper: #151a23;
  --rule: #323b4b; --good: #4cc38a; --bad: #ff7b72; --c0: #6ea0ff; --c1: #4fd0cd; --c2: #f0bd4f;
  --c3: #b08cff; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper);
  max-width: 860px; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.6rem; margin-bottom: .2rem; } h2 { font-size: 1.15rem; margin-top: 2rem; }
.lead, figcaption, .seen { color: var(--soft); }
.verdict { font-weight: 700; } .good { color: var(--good); } .bad { color: var(--bad); }
ul.checks { list-style: none; padding: 0; } ul.checks li { margin: .6rem 0; }
.seen { display: block; font-size: .88rem; overflow-wrap: anywhere; }
figure { margin: .5rem 0; overflow-x: auto; } svg { width: 100%; height: auto; }
.wide { overflow-x: auto; } table { border-collapse: collapse; width: 100%; font-size: .88rem; }
th, td { text-align: right; padding: .3rem .5rem; border-bottom: 1px solid var(--rule);
  white-space: nowrap; } th:first-child, td:first-child { text-align: left; }
tr.failed td { color: var(--bad); } tr.baseline td { border-top: 2px solid var(--rule); }
.label { font-size: 12px; fill: var(--soft); } .grid { stroke: var(--rule); }
.control { fill: none; stroke: var(--c0); stroke-width: 2; }
.interrupted { fill: none; stroke: var(--bad); stroke-width: 2; }
circle.resumed { fill: var(--c2); }
.kill { stroke: var(--bad); stroke-dasharray: 5 4; }
.killtext { font-size: 12px; fill: var(--bad); }
rect.released { fill: var(--c0); } rect.staged { fill: var(--c1); } rect.remote { fill: var(--c2); }
rect.durable { fill: var(--c3); } .key { display: inline-block; margin-right: 1.2rem; }
.key i { display: inline-block; width: .8em; height: .8em; margin-right: .4em; border-radius: 2px; }
"""


def write_report(result: Result, path: Path) -> None:
    """Write the report to ``path``."""
    path.write_text(render(result), encoding="utf-8")


def render(result: Result) -> str:
    """The report as HTML text."""
    plan = result.plan
    verdict = "proven" if result.proven else "not proven"
    body = [
        "<h1>groupio demonstration</h1>",
        f'<p class="lead">A GPT of {plan.layers} layers, {plan.width} wide, on {plan.ranks} ranks '
        f"({escape(plan.parallel)}), {plan.steps} steps, a save every {plan.save_every}. "
        f"Rank {plan.kill_rank} is killed while it saves step {plan.kill_step}.</p>",
        f'<p class="verdict {"good" if result.proven else "bad"}">The resumed run equals the '
        f"uninterrupted one, bit for bit: {verdict}.</p>",
        "<h2>What was checked</h2>",
        _checks(result),
        "<h2>Loss</h2>",
        _figure(
            loss_chart(
                {name: figures.losses(result.runs.get(name)) for name in RUNS}, plan.kill_step
            ),
            _keys(
                ("--c0", "control run"),
                ("--bad", "run that was killed (rings)"),
                ("--c2", "resumed run (dots)"),
            ),
        ),
        "<h2>Saves</h2>",
        "<p>Training goes on once a save is <b>released</b>; <b>staged</b> bytes survive the "
        "death of every rank; <b>durable</b> bytes survive a power cut.</p>",
        _figure(
            timeline_chart(_all_saves(result)),
            _keys(*((f"--c{number}", f"until {level}") for number, level in enumerate(LEVELS))),
        ),
        _table(result),
        _where(result),
    ]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>groupio demonstration: {verdict}</title><style>{STYLE}</style></head>"
        f"<body><main>{''.join(body)}</main></body></html>\n"
    )


def _checks(result: Result) -> str:
    lines = [
        f'<li><b class="{"good" if check.holds else "bad"}">{"✓" if check.holds else "✗"}</b> '
        f'{escape(check.claim)}<span class="seen">{escape(check.seen)}</span></li>'
        for check in result.checks
    ]
    return f'<ul class="checks">{"".join(lines)}</ul>'


def _figure(chart: str, caption: str) -> str:
    return f"<figure>{chart}<figcaption>{caption}</figcaption></figure>" if chart else ""


def _keys(*keys: tuple[str, str]) -> str:
    return "".join(
        f'<span class="key"><i style="background: var({color})"></i>{escape(word)}</span>'
        for color, word in keys
    )


def _all_saves(result: Result) -> list[tuple[str, SaveFigures]]:
    found = [
        (f"{name}, {save.label}", save) for name in RUNS for save in figures.saves(result, name)
    ]
    plain = figures.baseline(result)
    return found if plain is None else [*found, ("plain dcp.save, same state", plain)]


def _table(result: Result) -> str:
    heads = "".join(f"<th>{word}</th>" for word in ("save", *LEVELS, "logical", "unique", "stored"))
    rows = []
    for label, save in _all_saves(result):
        if save.failed:
            rows.append(
                f'<tr class="failed"><td>{escape(label)}</td>'
                f'<td colspan="7">{escape(save.failed)}, nothing of it was committed</td></tr>'
            )
            continue
        cells = [seconds_text(save.seconds(level)) for level in LEVELS]
        cells += [bytes_text(value) for value in (save.logical, save.unique, save.stored)]
        css = ' class="baseline"' if save.label == "dcp.save" else ""
        data = "".join(f"<td>{escape(cell)}</td>" for cell in cells)
        rows.append(f"<tr{css}><td>{escape(label)}</td>{data}</tr>")
    return (
        f'<div class="wide"><table><thead><tr>{heads}</tr></thead><tbody>{"".join(rows)}</tbody>'
        '</table></div><p class="lead">Seconds since the call, of the slowest rank; bytes of '
        "all ranks together. Plain dcp.save blocks until its files are synced.</p>"
    )


def _where(result: Result) -> str:
    control = result.runs.get("control")
    step = figures.step_seconds(control) if control is not None else None
    return (
        f'<p class="lead">groupio {escape(groupio.__version__)}, Python '
        f"{escape(platform.python_version())}, {escape(platform.platform())}; a training step "
        f"took {escape(seconds_text(step))} (median).</p>"
    )
