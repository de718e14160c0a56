"""Two charts as SVG text: the loss curve and the timelines of saves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from groupio.demo.figures import LEVELS, SaveFigures
from groupio.demo.table import seconds_text

WIDTH = 760
LEFT, RIGHT, TOP, BOTTOM = 56, 16, 16, 40
PLOT_HEIGHT = 260
ROW = 30
LABEL_WIDTH = 190

Curve = Sequence[tuple[int, float]]


def loss_chart(curves: Mapping[str, Curve], killed_at: int) -> str:
    """Loss by step: the control run as a line, the other two as marks on top of it.

    ``curves`` are those of the runs "control", "interrupted" and "resumed".
    """
    control, interrupted, resumed = (curves[n] for n in ("control", "interrupted", "resumed"))
    points = [*control, *interrupted, *resumed]
    if not points:
        return ""
    steps = max(step for step, _ in points)
    low = min(loss for _, loss in points) - 0.1
    high = max(loss for _, loss in points) + 0.1
    bottom = TOP + PLOT_HEIGHT

    def x(step: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * (step / steps)

    def y(loss: float) -> float:
        return bottom - PLOT_HEIGHT * (loss - low) / (high - low)

    parts = [_svg(bottom + BOTTOM, "Loss by training step")]
    for number in range(5):
        value = low + (high - low) * number / 4
        parts.append(_line(LEFT, y(value), WIDTH - RIGHT, y(value), "grid"))
        parts.append(_text(LEFT - 8, y(value) + 4, f"{value:.2f}", "end"))
    every = max(1, steps // 12)
    for step in range(0, steps + 1, every):
        parts.append(_text(x(step), bottom + 18, str(step), "middle"))
    parts.append(_text((LEFT + WIDTH - RIGHT) / 2, bottom + 35, "step", "middle"))
    line = " ".join(f"{x(s):.1f},{y(v):.1f}" for s, v in control)
    parts.append(f'<polyline class="control" points="{line}"/>')
    parts += [
        f'<circle class="interrupted" cx="{x(s):.1f}" cy="{y(v):.1f}" r="7"/>'
        for s, v in interrupted
    ]
    parts += [
        f'<circle class="resumed" cx="{x(s):.1f}" cy="{y(v):.1f}" r="3.5"/>' for s, v in resumed
    ]
    if interrupted:
        parts.append(_line(x(killed_at), TOP, x(killed_at), bottom, "kill"))
        parts.append(_text(x(killed_at) - 6, TOP + 12, "SIGKILL", "end", "killtext"))
    return "".join(parts) + "</svg>"


def timeline_chart(saves: Sequence[tuple[str, SaveFigures]]) -> str:
    """One bar per save: how long until released, staged, remote and durable."""
    longest = max((s.durable or s.released or 0.0 for _, s in saves), default=0.0)
    if not longest:
        return ""
    plot = WIDTH - LABEL_WIDTH - 90
    parts = [_svg(len(saves) * ROW + BOTTOM, "When each save reached each level")]
    for row, (label, save) in enumerate(saves):
        top = row * ROW + 6
        parts.append(_text(LABEL_WIDTH - 10, top + 14, label, "end"))
        if save.failed:
            parts.append(_text(LABEL_WIDTH, top + 14, save.failed, "start", "killtext"))
            continue
        start = 0.0
        for level in LEVELS:
            at = save.seconds(level)
            if at is None or at < start:
                continue
            left, width = LABEL_WIDTH + plot * start / longest, plot * (at - start) / longest
            tip = escape(f"{label}: {level} after {seconds_text(at)}")
            parts.append(
                f'<rect class="{level}" x="{left:.1f}" y="{top}" width="{max(width, 0.8):.1f}" '
                f'height="18"><title>{tip}</title></rect>'
            )
            start = at
        parts.append(
            _text(LABEL_WIDTH + plot * start / longest + 6, top + 14, seconds_text(start), "start")
        )
    bottom = len(saves) * ROW + 8
    for number in range(5):
        at = longest * number / 4
        parts.append(_text(LABEL_WIDTH + plot * number / 4, bottom + 16, f"{at:.2f} s", "middle"))
    return "".join(parts) + "</svg>"


def _svg(height: float, title: str) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-label="{escape(title)}">'


def _line(x1: float, y1: float, x2: float, y2: float, css: str) -> str:
    return f'<line class="{css}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def _text(x: float, y: float, text: str, anchor: str, css: str = "label") -> str:
    return (
        f'<text class="{css}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
    )
