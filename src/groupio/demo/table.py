"""The table at the end of the demonstration."""

from __future__ import annotations

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from groupio.demo import figures
from groupio.demo.figures import LEVELS, SaveFigures
from groupio.demo.run import Result


def print_table(result: Result, console: Console) -> None:
    """Print the saves of all runs, and plain ``dcp.save`` beside them. It fits 80 columns."""
    table = Table(
        title="Saves: seconds since the call (slowest rank), MB of all ranks",
        title_justify="left",
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        collapse_padding=True,
        pad_edge=False,
    )
    table.add_column("save")
    for word in (*LEVELS, "logical", "unique", "stored"):
        table.add_column(word, justify="right", no_wrap=True)
    for name in ("control", "interrupted", "resumed"):
        for save in figures.saves(result, name):
            _add(table, f"{name} {save.label.removeprefix('step ')}", save)
    plain = figures.baseline(result)
    if plain is not None:
        table.add_section()
        _add(table, "dcp.save", plain)
    console.print(table)


def seconds_text(value: float | None) -> str:
    """Seconds for people."""
    return "-" if value is None else f"{value:.3f} s" if value < 10 else f"{value:.1f} s"


def bytes_text(value: int | None) -> str:
    """Bytes for people, in MB of 10^6."""
    return "-" if value is None else f"{value / 1e6:.1f} MB"


def _add(table: Table, label: str, save: SaveFigures) -> None:
    if save.failed:
        table.add_row(label, "aborted", *[""] * 6, style="red")
        return
    seconds = (save.seconds(level) for level in LEVELS)
    sizes = (save.logical, save.unique, save.stored)
    table.add_row(
        label,
        *("-" if value is None else f"{value:.2f}" for value in seconds),
        *("-" if value is None else f"{value / 1e6:.1f}" for value in sizes),
    )
