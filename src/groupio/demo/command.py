"""The command line of the demonstration: ``groupio demo``."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from groupio.demo.launch import Plan


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demonstration; 0 proven, 1 not proven, 2 it could not be run.

    The report stays in the folder; checkpoints and logs are removed unless ``--keep``.
    """
    options = _parser().parse_args(argv)
    console = Console(stderr=options.json, highlight=False)
    problem = _problem(options)
    if problem:
        sys.stderr.write(f"groupio demo: {problem}\n")
        return 2
    # Only now: the parts below need torch, and --help should not wait for it.
    from groupio.demo.report import write_report
    from groupio.demo.run import as_json, remove_checkpoints, run_demo
    from groupio.demo.table import print_table

    folder = Path(options.dir or tempfile.mkdtemp(prefix="groupio-demo-")).absolute()
    plan = Plan(
        options.parallel,
        options.ranks,
        options.steps,
        _save_every(options),
        folder,
        layers=options.layers,
        width=options.width,
    )
    begin = time.monotonic()
    try:
        result = run_demo(plan, console)
        print_table(result, console)
        report = folder / "report.html"
        write_report(result, report)
    finally:
        if not options.keep:
            remove_checkpoints(plan)
    verdict, style = ("PROVEN", "bold green") if result.proven else ("NOT PROVEN", "bold red")
    console.print(f"{verdict} in {time.monotonic() - begin:.0f} s. Report: {report}", style=style)
    if options.json:
        document = {"schema": "groupio/demo/1", **as_json(result), "report": str(report)}
        sys.stdout.write(json.dumps(document) + "\n")
    return 0 if result.proven else 1


def _problem(options: argparse.Namespace) -> str:
    """Why the demonstration cannot be run like this; "" if it can."""
    if options.layers < 1 or options.width < 8 or options.width % 8:
        return f"--layers {options.layers} --width {options.width}: the width is a multiple of 8"
    if options.ranks < 2:
        return f"--ranks {options.ranks}: at least 2, one of them is killed"
    every = _save_every(options)
    if every < 1 or options.steps < 2 * every + 1:
        return (
            f"--steps {options.steps}, a save every {every}: give at least three saves, one to "
            "resume from, one to fail, one to end with"
        )
    try:
        import torch.distributed
    except ImportError:
        return "torch is not installed; install it with: pip install 'groupio[torch]'"
    if not torch.distributed.is_gloo_available():
        return "this torch is built without gloo, which the ranks need to talk to each other"
    folder = Path(options.dir or tempfile.gettempdir())
    if options.dir and (folder / "control").exists():
        return f"{folder} holds an earlier demonstration; remove it or give another --dir"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(folder).free
    except OSError as error:
        return f"{folder} cannot be used: {error.strerror}"
    # Both stores keep all their epochs; plain dcp.save is measured twice.
    copies = 2 * (options.steps // every + 1) + 2
    needed = copies * 3 * 4 * (12 * options.layers * options.width**2 + 600 * options.width)
    if free < needed:
        return (
            f"{folder} has {free / 1e9:.1f} GB free and {needed / 1e9:.1f} GB are needed; give "
            "another --dir, or fewer saves"
        )
    return ""


def _save_every(options: argparse.Namespace) -> int:
    every: int | None = options.save_every
    return max(1, options.steps // 4) if every is None else every


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="groupio demo",
        description=(
            "Train a small GPT on several ranks, kill one of them in the middle of a save, resume, "
            "and prove that the result equals an uninterrupted run bit for bit."
        ),
    )
    parser.add_argument("--parallel", choices=("fsdp", "ddp"), default="fsdp")
    parser.add_argument("--ranks", type=int, default=4, help="training processes (4)")
    parser.add_argument("--steps", type=int, default=12, help="training steps (12)")
    parser.add_argument("--save-every", type=int, help="steps between saves (a quarter)")
    parser.add_argument("--layers", type=int, default=8, help="layers of the GPT (8)")
    parser.add_argument("--width", type=int, default=512, help="width of the GPT (512)")
    parser.add_argument("--dir", help="folder for stores and report (a new one in the temp dir)")
    parser.add_argument("--keep", action="store_true", help="keep checkpoints and logs")
    parser.add_argument("--json", action="store_true", help="print the result as one JSON object")
    return parser
