"""Puts the figures of a run of the simulator into a document: the fault table with its hits.

``python -m groupio.testing.sim.publish FIGURES.json docs/reliability.md`` replaces what stands
between the two marks in the document. FIGURES.json is what ``--json`` of the simulator wrote.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

BEGIN = "<!-- figures of the simulator: begin -->"
END = "<!-- figures of the simulator: end -->"


def section(figures: dict[str, Any]) -> str:
    """The figures as Markdown."""
    cells: dict[str, dict[str, int]] = figures["cells"]
    unreachable: dict[str, str] = figures["cells_unreachable"]
    missed = set(figures["cells_missed"])
    steps = list(next(iter(cells.values())))
    seeds, wall = figures["seeds"], figures["wall_s"]
    lines = [
        f"{seeds:,} seeds, starting with {figures['first_seed']}: "
        f"**{figures['violations']} violations**; {figures['events']:,} events "
        f"({figures['events'] / seeds:,.0f} a seed), {figures['commits']:,} committed epochs, "
        f"{figures['loads']:,} loads through agents (in {figures['clean_loads']:,} of them nothing "
        f"failed), {figures['simulated_s'] / 86400:,.0f} simulated days in {wall:,.0f} s. "
        f"{figures['fault_cells_hit']} of {figures['fault_cells_total']} cells hit.",
        "",
        "| fault | " + " | ".join(step.replace("_", " ") for step in steps) + " |",
        "|---" * (len(steps) + 1) + "|",
    ]
    for row, hits in cells.items():
        counts = [
            "n/a" if f"{row} while {step}" in unreachable else f"{count:,}"
            for step, count in hits.items()
        ]
        lines.append(f"| {row.replace('_', ' ')} | " + " | ".join(counts) + " |")
    if unreachable:
        lines += ["", "Cells that cannot be hit:", ""]
        lines += [f"- {cell.replace('_', ' ')}: {why}" for cell, why in unreachable.items()]
    if missed:
        lines += ["", f"Not hit in this run: {', '.join(sorted(missed)).replace('_', ' ')}."]
    return "\n".join(lines)


def publish(text: str, figures: dict[str, Any]) -> str:
    """``text`` with the figures between its marks; ValueError when it has none."""
    head, begin, rest = text.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the document has no lines {BEGIN!r} and {END!r}")
    return f"{head}{BEGIN}\n\n{section(figures)}\n\n{END}{tail}"


def main(argv: list[str] | None = None) -> int:
    """Rewrite the document."""
    words = sys.argv[1:] if argv is None else argv
    if len(words) != 2:
        sys.stderr.write("usage: python -m groupio.testing.sim.publish FIGURES.json DOCUMENT\n")
        return 2
    figures = json.loads(Path(words[0]).read_text(encoding="utf-8"))
    document = Path(words[1])
    document.write_text(publish(document.read_text(encoding="utf-8"), figures), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
