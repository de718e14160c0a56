"""Bars of seconds by system as SVG, with the limits as marks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import NamedTuple

WIDTH = 860
LABEL = 150
RIGHT = 96
BAR = 13
GAP = 3
BETWEEN = 16
TOP = 34
BOTTOM = 42


class Bar(NamedTuple):
    """One bar; ``kind`` is its CSS class, ``value`` in seconds, None draws a dash."""

    kind: str
    label: str
    value: float | None


class Row(NamedTuple):
    """The bars of one system."""

    name: str
    bars: Sequence[Bar]


class Mark(NamedTuple):
    """A limit: a vertical line through all rows."""

    kind: str
    label: str
    value: float


def bar_chart(title: str, rows: Sequence[Row], marks: Sequence[Mark]) -> str:
    """The SVG; on a logarithmic scale when the values span more than a factor of 60."""
    values = [b.value for row in rows for b in row.bars if b.value] + [m.value for m in marks]
    if not values:
        return ""
    scale = _Scale(min(values), max(values))
    height = TOP + sum(_height(row) for row in rows) + BOTTOM
    parts = [
        f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(title)}" '
        'xmlns="http://www.w3.org/2000/svg">'
    ]
    bottom = height - BOTTOM
    for value in scale.ticks():
        x = scale.x(value)
        parts.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{bottom}"/>')
        parts.append(_text(x, bottom + 18, seconds(value), "tick", "middle"))
    word = "seconds, logarithmic" if scale.logarithmic else "seconds"
    parts.append(_text((LABEL + WIDTH - RIGHT) / 2, bottom + 36, word, "tick", "middle"))
    parts += [_mark(mark, number, marks, scale, bottom) for number, mark in enumerate(marks)]
    y = float(TOP)
    for row in rows:
        parts.append(_row(row, y, scale))
        y += _height(row)
    return "\n".join([*parts, "</svg>"])


def _height(row: Row) -> float:
    return len(row.bars) * (BAR + GAP) + BETWEEN


def _row(row: Row, top: float, scale: _Scale) -> str:
    middle = top + len(row.bars) * (BAR + GAP) / 2 + BETWEEN / 2
    parts = [_text(LABEL - 12, middle + 4, row.name, "system", "end")]
    y = top + BETWEEN / 2
    for bar in row.bars:
        if bar.value is None:
            parts.append(_text(LABEL + 6, y + BAR - 2, f"no {bar.label}", "none", "start"))
        else:
            width = max(scale.x(bar.value) - LABEL, 1.5)
            parts.append(
                f'<rect class="{bar.kind}" x="{LABEL}" y="{y:.1f}" width="{width:.1f}" '
                f'height="{BAR}" rx="2"><title>{escape(row.name)}: {escape(bar.label)} '
                f"{seconds(bar.value)}</title></rect>"
            )
            x = LABEL + width + 6
            parts.append(_text(x, y + BAR - 2, seconds(bar.value), "value", "start"))
        y += BAR + GAP
    return "\n".join(parts)


def _mark(mark: Mark, number: int, marks: Sequence[Mark], scale: _Scale, bottom: float) -> str:
    x = scale.x(mark.value)
    near_right = x > LABEL + (WIDTH - LABEL - RIGHT) * 0.6
    side, anchor = (-5, "end") if near_right else (5, "start")
    # Two limits that lie close have their words one above the other.
    lift = 13 if number % 2 and len(marks) > 1 else 0
    return (
        f'<line class="mark {mark.kind}" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP - 20 + lift}" '
        f'y2="{bottom}"/>'
        + _text(x + side, TOP - 12 + lift, f"{mark.label} {seconds(mark.value)}", "limit", anchor)
    )


class _Scale:
    def __init__(self, least: float, most: float) -> None:
        self.logarithmic = most / least > 60
        self._least = least / 1.6 if self.logarithmic else 0.0
        self._most = most

    def x(self, value: float) -> float:
        if self.logarithmic:
            value = max(value, self._least)
            share = math.log(value / self._least) / math.log(self._most / self._least)
        else:
            share = value / self._most
        return LABEL + (WIDTH - LABEL - RIGHT) * share

    def ticks(self) -> list[float]:
        if self.logarithmic:
            first, last = math.floor(math.log10(self._least)), math.ceil(math.log10(self._most))
            powers = [10.0**power for power in range(first, last + 1)]
            return [value for value in powers if self._least <= value <= self._most]
        step = 10 ** math.floor(math.log10(self._most))
        while self._most / step < 4:
            step /= 2
        while self._most / step > 8:
            step *= 2
        return [number * step for number in range(int(self._most / step) + 1)]


def seconds(value: float) -> str:
    """Seconds for people: "0", "85 ms", "1.23 s"."""
    if value == 0:
        return "0"
    if value < 0.01:
        return f"{value * 1e3:.2g} ms"
    if value < 1:
        return f"{value * 1e3:.0f} ms"
    return f"{value:.2f} s" if value < 100 else f"{value:.0f} s"


def _text(x: float, y: float, words: str, kind: str, anchor: str) -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
    return f'<text class="{kind}" {place}>{escape(words)}</text>'
