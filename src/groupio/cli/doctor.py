"""``groupio doctor``: what this machine and store allow, and what to do about it."""

from __future__ import annotations

from typing import Annotated

import typer

from groupio.cli import asking, checks
from groupio.cli.host import Host
from groupio.cli.output import ANSWER_IS_NO, OK, JsonFlag, console, emit_json, table, text
from groupio.errors import GroupIOError

_COLORS = {checks.Verdict.OK: "green", checks.Verdict.WARN: "yellow", checks.Verdict.FAIL: "red"}


def doctor(
    store: Annotated[
        str | None, typer.Argument(metavar="[STORE]", help="Also check this store's disk.")
    ] = None,
    as_json: JsonFlag = False,
) -> int:
    """Check memory, limits, disk and how long the agent lives; say what to do.

    Exit code 1 when a check failed.
    """
    found = examine(store)
    failed = any(check.verdict is checks.Verdict.FAIL for check in found)
    if as_json:
        emit_json("doctor", {"ok": not failed, "checks": [check.as_json() for check in found]})
    else:
        _print(found)
    return ANSWER_IS_NO if failed else OK


def examine(store: str | None, host: Host | None = None) -> list[checks.Check]:
    """All checks of ``host`` (this machine) and, if given, of ``store``."""
    host = host or Host()
    found = [
        checks.check_python(),
        checks.check_torch(),
        checks.check_memory(host),
        checks.check_budget(checks.planned_budget(), host),
        checks.check_files(),
        checks.check_runtime_dir(asking.paths()),
        checks.check_scope(host),
        checks.check_shared_memory(host),
        checks.check_huge_pages(host),
    ]
    if store is not None:
        try:
            found += checks.check_store(store)
        except GroupIOError as error:
            found.append(checks.store_failed(error))
    return found


def _print(found: list[checks.Check]) -> None:
    rows = table("", "check", "finding")
    for check in found:
        color = _COLORS[check.verdict]
        rows.add_row(f"[{color}]{check.verdict}[/]", check.name, text(check.finding))
        if check.advice:
            rows.add_row("", "", f"[dim]{text(check.advice)}[/]")
    console().print(rows)
