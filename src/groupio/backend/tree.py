"""The directory tree of a POSIX store: where it is, its open folders, and reading from them."""

from __future__ import annotations

import builtins
import os
import re
import stat
import threading
from collections.abc import Iterable
from typing import Self
from urllib.parse import unquote, urlsplit

from groupio.backend.base import FOLDERS, ROOT, SEGMENTS, read_record
from groupio.backend.faults import close_quietly, storage_error
from groupio.backend.folders import Folder, check_name, open_folder
from groupio.backend.records import TEMPORARY, PosixReader, find, open_regular
from groupio.errors import IntegrityError, InvalidInput, NotFound

_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.\-]*(?=://)")


def store_path(store: str | os.PathLike[str]) -> str:
    """The absolute path of a store given as a path or ``file://`` URL, else InvalidInput."""
    text = os.fspath(store)
    scheme = _SCHEME.match(text)
    if scheme is not None:
        url = urlsplit(text)
        if url.scheme != "file":
            raise InvalidInput(
                f"the store {text!r} has the scheme {scheme.group()!r}, which is not supported: "
                "give a path or a file:// URL"
            )
        if url.netloc not in ("", "localhost") or url.query or url.fragment:
            raise InvalidInput(
                f"the store {text!r} is not a local file URL: write file:///absolute/path, "
                "with '?' and '#' as %3F and %23"
            )
        text = unquote(url.path)
    if not text or "\0" in text:
        raise InvalidInput(f"the store {text!r} is not a path: give the path of a directory")
    return os.path.abspath(text)


class PosixTree:
    """The part of :class:`groupio.backend.posix.PosixBackend` that finds and reads files.

    Folders are opened when first needed and stay open.
    """

    def __init__(self, path: str, root: Folder) -> None:
        self._path = path
        self._root = root
        self._lock = threading.Lock()
        self._folders: dict[str, Folder] = {ROOT: root}

    @property
    def path(self) -> str:
        """The absolute path of the store."""
        return self._path

    def list(self, folder: str) -> builtins.list[str]:
        """The names in ``folder`` in ascending order, without unfinished ones; [] if absent."""
        return [name for name in self._names(folder) if not name.startswith(".")]

    def unfinished(self, folder: str) -> builtins.list[str]:
        """The names in ``folder`` of records that are being written, or whose writers died."""
        return [name for name in self._names(folder) if name.startswith(TEMPORARY)]

    def identities(self, folder: str) -> dict[str, int]:
        """What :meth:`list` gives, each name with its inode, from one listing."""
        entries = self._entries(folder)
        return {name: entries[name] for name in sorted(entries) if not name.startswith(".")}

    def _names(self, folder: str) -> builtins.list[str]:
        return sorted(self._entries(folder))

    def _entries(self, folder: str) -> dict[str, int]:
        try:
            where = self._folder(folder)
            # A descriptor of its own: threads that list would share the reading position.
            fd = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=where.fd)
        except FileNotFoundError:
            return {}
        except OSError as error:
            raise storage_error(error, self._where(folder), "open") from error
        try:
            with os.scandir(fd) as listing:
                return {entry.name: entry.inode() for entry in listing}
        except OSError as error:
            raise storage_error(error, where.path, "list") from error
        finally:
            close_quietly(fd)

    def exists(self, folder: str, name: str) -> bool:
        """Whether there is such a name."""
        check_name(name)
        try:
            return find(self._folder(folder), name) is not None
        except FileNotFoundError:
            return False

    def size(self, folder: str, name: str) -> int:
        """Bytes in the file; errors as :meth:`reader`."""
        with self.reader(folder, name) as reader:
            return reader.size

    def sizes(self, folder: str, names: Iterable[str]) -> dict[str, int]:
        """Bytes in each of these files; -1 for a name under which there is no regular file."""
        found = dict.fromkeys(map(check_name, names), -1)
        try:
            where = self._folder(folder)
        except FileNotFoundError:
            return found
        for name in found:
            try:
                status = os.stat(name, dir_fd=where.fd, follow_symlinks=False)
            except FileNotFoundError:
                continue
            except OSError as error:
                raise storage_error(error, self._where(folder, name), "look up") from error
            if stat.S_ISREG(status.st_mode):
                found[name] = status.st_size
        return found

    def read(self, folder: str, name: str, offset: int = 0, length: int | None = None) -> bytes:
        """Exactly ``length`` bytes from ``offset``; errors as :meth:`reader`.

        With ``length`` None to the end; then IntegrityError when the file is larger than
        ``RECORD_BYTES_MAX``.
        """
        with self.reader(folder, name) as reader:
            if length is None:
                return read_record(reader)[offset:]
            return reader.read(offset, length)

    def read_into(self, folder: str, name: str, offset: int, view: memoryview) -> None:
        """Fill ``view``; IntegrityError when the file is shorter or missing."""
        try:
            reader = self.reader(folder, name)
        except NotFound as error:
            raise _missing(self._where(folder, name)) from error
        with reader:
            reader.read_into(offset, view)

    def reader(self, folder: str, name: str) -> PosixReader:
        """Keep the file open for many reads.

        NotFound when it is absent; an absent segment is IntegrityError, for only a record that
        promises it leads there. StorageError when it cannot be read.
        """
        check_name(name)
        path = self._where(folder, name)
        try:
            fd, status = open_regular(self._folder(folder), name)
        except FileNotFoundError as error:
            raise (_missing(path) if folder == SEGMENTS else _absent(path)) from error
        return PosixReader(fd, status.st_size, path)

    def delete(self, folder: str, name: str) -> None:
        """Remove the file if it is there. A power cut right after may bring it back."""
        check_name(name)
        try:
            os.unlink(name, dir_fd=self._folder(folder).fd)
        except FileNotFoundError:
            pass
        except OSError as error:
            raise storage_error(error, self._where(folder, name), "remove") from error

    def _where(self, folder: str, name: str = "") -> str:
        return os.path.join(self._path, folder, name).rstrip("/") or "/"

    def _folder(self, name: str) -> Folder:
        folder = self._folders.get(name)
        if folder is None:
            if name not in FOLDERS:
                raise InvalidInput(f"a store has no folder {name!r}: use one of {FOLDERS}")
            opened = open_folder(self._root, name)
            with self._lock:
                folder = self._folders.setdefault(name, opened)
            if folder is not opened:
                opened.close()
        return folder

    def _writable(self, name: str) -> Folder:
        try:
            return self._folder(name)
        except FileNotFoundError as error:
            raise storage_error(error, self._where(name), "write to") from error

    def close(self) -> None:
        """Release the store. Safe to repeat; no other call may be running."""
        for folder in self._folders.values():
            folder.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _missing(path: str) -> IntegrityError:
    return IntegrityError(
        f"{path} is missing although a record refers to it: restore it, or load another epoch",
        path=path,
    )


def _absent(path: str) -> NotFound:
    return NotFound(f"there is no {path}", path=path)
