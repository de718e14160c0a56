"""``groupio demo``: hands its arguments over to :mod:`groupio.demo`, which needs torch."""

from __future__ import annotations

import typer

from groupio.cli.output import USAGE_OR_ENVIRONMENT

PASS_THROUGH = {"allow_extra_args": True, "ignore_unknown_options": True}


def demo(context: typer.Context) -> int:
    """Train, kill a rank in the middle of a save, resume, and prove equality bit for bit.

    Options are those of the demonstration itself: see groupio demo --help.
    """
    from groupio.demo.command import main  # imports torch when it runs

    try:
        return main(context.args)
    except SystemExit as end:  # argparse ends so, after its message
        return end.code if isinstance(end.code, int) else USAGE_OR_ENVIRONMENT
