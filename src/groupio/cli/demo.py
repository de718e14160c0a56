"""``groupio demo``: hands over to :mod:`groupio.demo`, which needs torch."""

from __future__ import annotations
