"""Rules for all tests: what root can test is tested, and nothing is skipped in silence."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

from fuse_mount import FuseMount

MUST_RUN = os.geteuid() == 0 and Path("/etc/debian_version").exists()
"""On Debian as root everything can be had, accelerators and optional peers excepted."""

# How long an example takes says nothing on a machine that does other work too.
hypothesis.settings.register_profile("groupio", deadline=None)
hypothesis.settings.load_profile("groupio")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that mount and make devices need root."""
    if os.geteuid() == 0:
        return
    for item in items:
        if item.get_closest_marker("root"):
            item.add_marker(pytest.mark.skip(reason="needs root"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Iterator[pytest.TestReport]:
    """Where everything can be had, a skipped test is a failed one."""
    report = yield
    if report.skipped and MUST_RUN and not hasattr(report, "wasxfail"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        if "accelerator" not in reason and "peer not installed:" not in reason:
            report.outcome = "failed"
            report.longrepr = f"skipped where nothing may be: {reason}"
    return report


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[FuseMount]:
    """A directory behind a FUSE process that can be killed and started again."""
    made = FuseMount(tmp_path / "served", tmp_path / "mount")
    try:
        yield made.up()
    finally:
        made.close()
