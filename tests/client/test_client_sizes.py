"""Sizes and rates as people write them."""

from __future__ import annotations

import pytest

import groupio
from groupio.settings import parse_rate, parse_size


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("17", 17),
        ("8G", 8 << 30),
        ("64GiB", 64 << 30),
        ("64gib", 64 << 30),
        ("64GB", 64 * 10**9),
        (" 1.5 MiB ", 3 << 19),
        ("2TB", 2 * 10**12),
        ("100B", 100),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size
    assert parse_rate(text + "/s") == parse_rate(text) == size


@pytest.mark.parametrize("text", ["", "G", "-1", "1e9", "8 GiBs", "8GB/h", "8GB/s"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ValueError, match=text or "^$"):
        parse_size(text)


def test_the_environment_reads_the_same_way() -> None:
    settings = groupio.Settings.from_env(
        {"GROUPIO_MEMORY_BYTES": "64GiB", "GROUPIO_UPLINK_BYTES_PER_S": "12.5GB/s"}
    )
    assert settings.memory_bytes == 64 << 30
    assert settings.uplink_bytes_per_s == 12.5e9
