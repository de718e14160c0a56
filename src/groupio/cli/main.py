"""The program ``groupio``: which commands there are, and what their exit codes mean.

0: ok. 1: the answer is "no" (damage found, no agent runs). 2: a usage or environment error, told
in one line on stderr. Commands are imported when they are called, so that ``groupio --help`` and
small commands start quickly.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import typer

from groupio.cli import agent, bench, controller, demo, doctor, export, show, status, up, verify
from groupio.cli.output import ANSWER_IS_NO, OK, USAGE_OR_ENVIRONMENT, CommandError, say_error
from groupio.errors import GroupIOError, IntegrityError

# typer's base of all usage errors; its home differs between the versions of typer.
_UsageErrors: type[Any] = next(
    base for base in typer.BadParameter.__mro__ if base.__name__ == "ClickException"
)

app = typer.Typer(
    name="groupio",
    help="Grouped I/O for AI jobs: look into stores, check them, and steer the node's agent.",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
app.command("demo", context_settings=demo.PASS_THROUGH, add_help_option=False)(demo.demo)
app.add_typer(agent.app, name="agent")
app.add_typer(controller.app, name="controller")
app.command("up")(up.up)
app.add_typer(bench.app, name="bench")
app.command("ls")(show.list_epochs)
app.command("show")(show.show_epoch)
app.command("verify")(verify.verify)
app.command("export")(export.export)
app.command("status")(status.status)
app.command("doctor")(doctor.doctor)


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: bool = typer.Option(False, "--version", help="Print the version and exit."),
) -> None:
    if version:
        import groupio

        typer.echo(f"groupio {groupio.__version__}")
        raise typer.Exit(OK)
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise typer.Exit(OK)


def run(arguments: Sequence[str]) -> int:
    """Run one command line; the exit code. Never raises for what a user can do wrong."""
    try:
        result = app(args=list(arguments), prog_name="groupio", standalone_mode=False)
    except typer.Abort:
        return _failed("interrupted", USAGE_OR_ENVIRONMENT)
    except _UsageErrors as error:
        return _failed(error.format_message(), USAGE_OR_ENVIRONMENT)
    except CommandError as error:
        return _failed(str(error), USAGE_OR_ENVIRONMENT)
    except IntegrityError as error:
        return _failed(error.message, ANSWER_IS_NO)
    except GroupIOError as error:
        return _failed(error.message, USAGE_OR_ENVIRONMENT)
    except OSError as error:
        where = f" ({error.filename})" if error.filename else ""
        return _failed(f"{error.strerror or error}{where}", USAGE_OR_ENVIRONMENT)
    except KeyboardInterrupt:
        return _failed("interrupted", USAGE_OR_ENVIRONMENT)
    return result if isinstance(result, int) else OK


def _failed(message: str, code: int) -> int:
    say_error(message)
    return code


def main() -> None:
    """Entry point of the ``groupio`` script."""
    code = run(sys.argv[1:])
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader of a pipe left early, as `groupio ls | head -1` does; that is no failure.
        sys.stderr.close()
    sys.exit(code)
