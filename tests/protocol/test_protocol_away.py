"""For which errors of a store new saves wait."""

from __future__ import annotations

import errno

import pytest

from groupio.errors import StorageError
from groupio.protocol import reasons


@pytest.mark.parametrize(
    ("number", "away", "waits"),
    [
        (errno.ESTALE, True, True),
        (errno.ENOTCONN, True, True),
        (errno.ECONNABORTED, True, True),
        (errno.ECONNREFUSED, True, True),
        (errno.ECONNRESET, True, True),
        (errno.ESHUTDOWN, True, True),
        # Its path leads to another file system: what is sealed is kept, new saves are refused.
        (errno.EREMCHG, True, False),
        (errno.EIO, False, False),
        (None, False, False),
    ],
)
def test_new_saves_wait_for_a_store_that_may_return(
    number: int | None, away: bool, waits: bool
) -> None:
    error = StorageError("the store", errno=number)
    assert (reasons.is_away(error), reasons.may_return(error)) == (away, waits)


def test_no_error_is_no_reason_to_wait() -> None:
    assert not reasons.is_away(None)
    assert not reasons.may_return(None)
