"""Output of commands: one JSON object on stdout, or tables for people; errors in one line."""

from __future__ import annotations

import datetime
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Annotated, Any

import typer
from rich.cells import cell_len
from rich.console import Console
from rich.markup import escape
from rich.table import Table

JsonFlag = Annotated[
    bool, typer.Option("--json", help="Print one JSON object (docs/cli.md) instead of tables.")
]

StoreArgument = Annotated[
    str, typer.Argument(metavar="STORE", help="The store: a path or a file:// URL.")
]

_PIECES = 1 << 14

OK = 0
ANSWER_IS_NO = 1
USAGE_OR_ENVIRONMENT = 2

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


class CommandError(Exception):
    """Ends the command with exit code 2 and this one line on stderr."""


PIPE_COLUMNS = 400
"""Tables that no terminal shows are as wide as their longest lines, up to this."""


def console() -> Console:
    """Where tables and text for people go: stdout, as it is now; without wrapping in a pipe."""
    is_terminal = sys.stdout.isatty()
    width = None if is_terminal or "COLUMNS" in os.environ else PIPE_COLUMNS
    return Console(file=sys.stdout, highlight=False, soft_wrap=not is_terminal, width=width)


def error_console() -> Console:
    """Where progress and errors go: stderr, as it is now."""
    return Console(file=sys.stderr, highlight=False)


def emit_json(command: str, body: dict[str, Any], *, indent: int | None = 2) -> None:
    """Print ``body`` as the JSON document of ``command``, schema version 1."""
    document = {"schema": f"groupio/{command}/1", **body}
    if indent is None:
        sys.stdout.write(json.dumps(document, default=str))
    else:
        # Piece by piece: the document of a million items is hundreds of megabytes.
        pieces = json.JSONEncoder(indent=indent, default=str).iterencode(document)
        while block := "".join(islice(pieces, _PIECES)):
            sys.stdout.write(block)
    sys.stdout.write("\n")
    sys.stdout.flush()


class LazyArray(list[Any]):
    """A JSON array whose elements are made while :func:`emit_json` writes it, with ``indent``."""

    def __init__(self, count: int, make: Callable[[], Iterator[Any]]) -> None:
        super().__init__()
        self._count = count
        self._make = make

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Any]:
        return self._make()


def one_line(message: str) -> str:
    """``message`` without line breaks and control characters, so that it stays one line."""
    words = " ".join(message.split())
    return "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in words)


def say_error(message: str) -> None:
    """Print one clear line on stderr."""
    sys.stderr.write(f"groupio: {one_line(message)}\n")


def table(*columns: str, right: tuple[str, ...] = ()) -> Table:
    """An empty table with plain headings; columns in ``right`` are aligned right."""
    made = Table(box=None, pad_edge=False, header_style="bold", collapse_padding=True)
    for column in columns:
        justify: Any = "right" if column in right else "left"
        made.add_column(column, justify=justify, overflow="fold")
    return made


def print_rows(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print a table of which any number of rows takes little time, on stdout.

    Columns are aligned right, but for the last two. Nothing in a cell moves the cursor. The table
    of rich looks at each cell several times: 5,000 rows take seconds.
    """
    cells = [list(columns), *([_printable(cell) for cell in row] for row in rows)]
    widths = [max(map(cell_len, column)) for column in zip(*cells, strict=True)]
    last = len(columns) - 2
    lines = []
    for row in cells:
        padded = []
        for index, (cell, width) in enumerate(zip(row[:-1], widths, strict=False)):
            space = " " * (width - cell_len(cell))
            padded.append(cell + space if index == last else space + cell)
        lines.append(" ".join([*padded, row[-1]]).rstrip())
    console().print(f"[bold]{escape(lines[0])}[/]", soft_wrap=True)
    sys.stdout.write("".join(f"{line}\n" for line in lines[1:]))


def text(value: object) -> str:
    """``value`` for a table cell: nothing in it acts as markup or moves the cursor."""
    return escape(_printable(value))


def _printable(value: object) -> str:
    shown = str(value)
    if shown.isprintable():
        return shown
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in shown)


def size(count: float | None) -> str:
    """Bytes for people: 1536 is "1.5 KiB"."""
    if count is None:
        return "-"
    amount = float(count)
    for unit in _UNITS:
        if abs(amount) < 1024 or unit == _UNITS[-1]:
            break
        amount /= 1024
    return f"{amount:.0f} {unit}" if unit == "B" or amount >= 100 else f"{amount:.1f} {unit}"


def rate(bytes_per_s: float) -> str:
    """A bandwidth for people, in powers of 1000 as vendors count: 12.5e9 is "12.5 GB/s"."""
    amount = float(bytes_per_s)
    for unit in ("B/s", "kB/s", "MB/s", "GB/s"):
        if amount < 1000 or unit == "GB/s":
            break
        amount /= 1000
    return f"{amount:.0f} {unit}" if amount >= 100 else f"{amount:.3g} {unit}"


def moment(seconds: float) -> str:
    """Seconds since 1970 as local time."""
    return datetime.datetime.fromtimestamp(seconds).astimezone().strftime("%Y-%m-%d %H:%M:%S")


def iso(seconds: float) -> str:
    """Seconds since 1970 as ISO 8601 in UTC, for JSON."""
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).isoformat(timespec="milliseconds")


def duration(seconds: float) -> str:
    """A time span for people: "3.2 s", "4 min", "2.5 h"."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    if seconds < 3600:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"
