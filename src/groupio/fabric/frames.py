"""The frames of the TCP fabric and their limits; all numbers little-endian.

A client asks, the server answers in the order in which it has the chunks:

- request: kind, count of wants, tag of the first, milliseconds to wait, bytes of a probe (24);
  then ``count`` wants: digest, offset, length, 1 for a whole chunk (41 each). Their tags count up.
- answer: status, tag, length, padding (64, so that large bytes stay at multiples of a cache line
  on their way through the system, which copies them faster then); with ``OK`` that many bytes
  follow, and for a part of a chunk the BLAKE3 of the part (32).
- a probe is answered by one ``OK`` of length 0 and then as many zero bytes as were asked for.

Every size is checked against these limits before memory is used for it.
"""

from __future__ import annotations

import struct

REQUEST = struct.Struct("<BxxxIIIQ")
WANT = struct.Struct("<32sIIB")
ANSWER = struct.Struct("<BxxxII52x")

PULL = 1
PROBE = 2

OK = 0
MISSING = 1
RANGE = 2

WANTS_MAX = 512
"""Wants of one request."""

TAGS = 1 << 32
"""A tag is less than this."""

WAIT_MS_MAX = 3_600_000
"""A server never waits longer than this for a chunk, milliseconds."""

PROBE_BYTES_MAX = 1 << 30
"""Bytes of one probe."""
