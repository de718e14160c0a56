"""A store whose directories cannot be listed: a typed error, never an empty answer."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from groupio.client.store_parts import is_store, parts_in
from groupio.errors import StorageError


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.EACCES])
def test_parts_that_cannot_be_listed(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def listdir(path: str) -> list[str]:
        raise OSError(number, os.strerror(number), path)

    monkeypatch.setattr(os, "listdir", listdir)
    for ask in (parts_in, is_store):
        with pytest.raises(StorageError) as caught:
            ask(str(tmp_path))
        assert caught.value.errno == number
        assert str(tmp_path) in caught.value.message
