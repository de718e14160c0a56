"""Versions and limits of the stored formats.

Every count and size that is read from a store is compared with one of these before memory is
allocated for it, so that a damaged or hostile record costs a typed error and not the host's
memory. The writers check the same limits: what was written can be read back.
"""

from __future__ import annotations

RECORD_VERSION = 1
"""Version of manifests and of abort, in-flight, lineage and controller records."""

SEGMENT_VERSION = 1
"""Version of segment files without frames."""

FRAMED_SEGMENT_VERSION = 2
"""Version of segment files with frames, in which torch can read tensors."""

STORE_FORMAT = 1
"""The ``format`` number of a store's id record."""

PLAIN_VERSION = 1
"""First byte of an encoded plain value that older releases read too."""

PLAIN_VERSION_MAX = 2
"""First byte of one with other containers than list, tuple and dict, or with columns."""

ITEMS_VERSION = 1
"""Version of an encoded item table."""

PLAIN_BYTES_MAX = 1 << 34
"""Largest encoded plain value, in bytes."""

PLAIN_DEPTH_MAX = 100
"""Containers nested deeper than this are refused (it also ends a cycle)."""

NDIM_MAX = 64
"""Most dimensions of an array, as in numpy 2."""

DTYPE_NAME_MAX = 64
"""Longest name of a dtype, in characters."""

DTYPE_FIELDS_MAX = 4096
"""Most fields of one structured dtype."""

NAME_BYTES_MAX = 4096
"""Longest item name, in bytes of UTF-8."""

ITEMS_MAX = 1 << 20
"""Most items of one member."""

ITEM_BYTES_MAX = 1 << 48
"""Largest item, in bytes."""

GLOBAL_BYTES_LOG2_MAX = 60
"""Binary logarithm of the largest global tensor, in bytes."""

ITEM_TABLE_BYTES_MAX = 1 << 27
"""Largest encoded item table, in bytes."""

LINEAGE_MAX = 10**8 - 1
"""Largest lineage number: eight digits in a key."""

ATTEMPT_MAX = 10**6 - 1
"""Largest attempt number: six digits in a key."""

TERM_MAX = (1 << 63) - 1
"""Largest term of a controller."""

ADDRESS_MAX = 512
"""Longest address of a controller, in characters."""

SEGMENT_SEQ_MAX = 10**6 - 1
"""Most segment files that one node writes for one epoch, less one."""

CHUNKS_MAX = 1 << 26
"""Most unique chunks of an epoch, of one segment, or of one member."""

SEGMENTS_MAX = 1 << 20
"""Most segments that one epoch refers to."""

AGE_MAX = 1 << 31
"""Most epochs that a segment is counted to have been referred to by."""

SEGMENT_BYTES_MAX = 1 << 44
"""Largest segment file, in bytes."""

FRAMES_MAX = 1 << 20
"""Most rows in the frames of one file."""

FRAME_KINDS_MAX = 1 << 18
"""Most kinds of tensors in the frames of one file."""

FRAME_KINDS_BYTES_MAX = 1 << 26
"""Largest table of kinds when unpacked, in bytes."""

FRAMES_BYTES_MAX = 1 << 28
"""Largest frames region of one file, in bytes."""

INDEX_BYTES_MAX = 48 * CHUNKS_MAX + 20 * FRAMES_MAX + FRAME_KINDS_BYTES_MAX + (1 << 16)
"""Largest index of a segment, in bytes."""

TABLE_BYTES_MAX = 1 << 28
"""Largest table of a manifest (segments, members, blocks) when unpacked, in bytes."""

ROOT_BYTES_MAX = 1 << 24
"""Largest root (the header of an epoch, or a small record), in bytes."""

METADATA_BYTES_MAX = 1 << 20
"""Largest encoded ``metadata`` of an epoch, in bytes."""

CATALOGUE_BYTES_MAX = 1 << 26
"""Largest catalogue of decisions, in bytes, packed and unpacked."""

CATALOGUE_ENTRY_BYTES_MAX = 4096
"""Largest entry of a catalogue, in bytes; an epoch with more metadata has none."""

TEXT_MAX = 1 << 16
"""Longest free text in a record (a reason, a job name, a host), in characters."""

FIRST_READ_BYTES = 4096
"""A reader asks for this much first: the header and, nearly always, the whole root."""

SCAN_BYTES = 8 << 20
"""Data of a segment is verified in pieces of this size; at least two chunks."""
