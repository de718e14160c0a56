"""Bytes at rest: pure functions between the model and what lies in a store.

``items`` and ``codec`` describe what a member saves, ``records`` and ``manifest`` what a group
decided, ``segment`` where the chunks lie. Everything here is little-endian, has a version, a limit
for each count, and a digest over each byte. Nothing does I/O: readers are given a function.
"""

from __future__ import annotations
