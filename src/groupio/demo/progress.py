"""Shows the progress of the demonstration while it runs."""

from __future__ import annotations

from types import TracebackType
from typing import Any, Self

from rich import progress as bars
from rich.console import Console

from groupio.demo.launch import Plan

HEARTBEAT_S = 10.0


class Progress:
    """A bar on terminals, lines elsewhere; errors of ranks are always lines."""

    def __init__(self, console: Console, plan: Plan) -> None:
        self._console = console
        self._plan = plan
        self._ready = 0
        self._spoke = 0.0
        self._saved: dict[int, int] = {}
        self._bar = bars.Progress(
            bars.TextColumn("  {task.description}"),
            bars.BarColumn(),
            bars.MofNCompleteColumn(),
            bars.TimeElapsedColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("starting the ranks", total=plan.steps)

    def __enter__(self) -> Self:
        self._line(f"starting {self._plan.ranks} ranks under torchrun, which takes some seconds")
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bar.stop()

    def tick(self, seconds: float) -> None:
        """Time passes: say so where no bar moves."""
        if not self._console.is_terminal and seconds - self._spoke >= HEARTBEAT_S:
            self._spoke = seconds
            if self._ready < self._plan.ranks:
                self._line(f"{seconds:3.0f} s: {self._ready} of {self._plan.ranks} ranks are up")

    def event(self, event: dict[str, Any]) -> None:
        """Show one event of a rank."""
        show = getattr(self, f"_on_{event['kind']}", None)
        if show is not None:
            show(event)

    def _line(self, text: str, style: str = "") -> None:
        self._console.print(f"  {text}", style=style, markup=False, highlight=False)

    def _on_ready(self, event: dict[str, Any]) -> None:
        self._ready += 1
        self._bar.update(self._task, completed=event["step"])
        if self._ready == self._plan.ranks:
            self._line(f"{self._ready} ranks are up, {self._plan.parallel}, training starts")

    def _on_resumed(self, event: dict[str, Any]) -> None:
        if event["rank"] == 0:
            self._line(f"loaded the newest epoch: step {event['step']}", "cyan")

    def _on_step(self, event: dict[str, Any]) -> None:
        if event["rank"] == 0:
            text = f"step {event['step']:3d}  loss {event['loss']:.4f}"
            self._bar.update(self._task, completed=event["step"], description=text)
            if not self._console.is_terminal:
                self._line(f"{text}  {event['seconds']:.1f} s")

    def _on_saved(self, event: dict[str, Any]) -> None:
        done = self._saved[event["step"]] = self._saved.get(event["step"], 0) + 1
        if done == self._plan.ranks:
            self._line(
                f"saved step {event['step']}: released after {event['released']:.2f} s, "
                f"durable after {event['durable']:.2f} s",
                "cyan",
            )

    def _on_killed(self, event: dict[str, Any]) -> None:
        self._line(
            f"rank {event['rank']} kills itself with SIGKILL: {event['copied'] / 1e6:.1f} of "
            f"{event['total'] / 1e6:.1f} MB of its state are copied",
            "bold red",
        )

    def _on_error(self, event: dict[str, Any]) -> None:
        self._line(f"rank {event['rank']} got {event['type']}: {event['message']}", "red")

    def _on_stopped(self, event: dict[str, Any]) -> None:
        self._line(f"rank {event['rank']} stops: {event['message']}", "dim")

    def _on_dcp(self, event: dict[str, Any]) -> None:
        if event["rank"] == 0:
            self._line(f"plain dcp.save of the same state: {event['seconds']:.2f} s", "cyan")
