"""Parts of a step: what is saved in calls of its own under one epoch, as model and optimizer.

Each part is a line of epochs of its own, kept as a store in a folder of the store:
``<store>/parts/<part>``. So each is committed, fenced and recovered by itself, with its own
lineages and doors; nothing is deduplicated between parts. What is loaded together is an epoch that
is committed in all of the parts.
"""

from __future__ import annotations

import os
import re
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from typing import TYPE_CHECKING, Any

from groupio.backend.faults import storage_error
from groupio.client import nesting
from groupio.client.address import recorded_job, store_address
from groupio.errors import FormatError, GroupIOError, IntegrityError, InvalidInput, NotFound

if TYPE_CHECKING:
    from groupio.client.client import Client
    from groupio.client.store_reader import StoreReader

PARTS = "parts"
"""The folder of a store that has its parts."""

_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,63}")

DAMAGE = (IntegrityError, FormatError)


class PartStore(str):
    """The path of a part, which knows the job that it belongs to."""

    __slots__ = ()

    @property
    def job(self) -> str:
        """The job of the part: that of its store, and the name of the part."""
        store, part = os.path.dirname(os.path.dirname(self)), os.path.basename(self)
        return recorded_job(self) or f"{recorded_job(store) or os.path.basename(store)}/{part}"


def check_part(part: object) -> str:
    """``part`` as a name; InvalidInput unless it can be one.

    A name has 1 to 64 letters, digits, ``_``, ``-`` and ``.``, and does not begin with a dot.
    """
    if not isinstance(part, str):
        raise InvalidInput(f"part={part!r} is of type {type(part).__name__}; give its name as str")
    if not _NAME.fullmatch(part):
        raise InvalidInput(
            f"part={part[:80]!r} is no name of a part: give 1 to 64 letters, digits, '_', '-' and "
            "'.', not beginning with a dot"
        )
    return part


def check_parts(parts: object) -> tuple[str | None, ...]:
    """``parts`` of a load; None among them is the unnamed part. InvalidInput for anything else."""
    if isinstance(parts, str) or not isinstance(parts, Iterable):
        raise InvalidInput(f"parts={parts!r} must be a tuple of the names of parts")
    found = tuple(None if part is None else check_part(part) for part in parts)
    if not found or len(set(found)) < len(found):
        raise InvalidInput(f"parts={found!r} must name at least one part, and each of them once")
    return found


def part_store(store: str | os.PathLike[str], part: str | None) -> str | os.PathLike[str]:
    """The store of a part: ``store`` itself for the unnamed one; InvalidInput for a bad name."""
    if part is None:
        return store
    return PartStore(os.path.join(store_address(store), PARTS, check_part(part)))


def parts_in(path: str) -> list[str]:
    """The names of the parts that were saved to the store at ``path``, sorted.

    StorageError when it cannot be listed.
    """
    try:
        names = os.listdir(os.path.join(path, PARTS))
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise storage_error(error, os.path.join(path, PARTS), "list") from error
    found = (name for name in names if _NAME.fullmatch(name))
    return sorted(name for name in found if is_store(os.path.join(path, PARTS, name)))


def is_store(path: str) -> bool:
    """There is a store at ``path``, also one that has lost its record."""
    if os.path.lexists(os.path.join(path, "groupio.json")):
        return True
    try:
        return bool(os.listdir(os.path.join(path, "epochs")))
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise storage_error(error, os.path.join(path, "epochs"), "list") from error


def words(part: str | None) -> str:
    """A part, for a sentence."""
    return "the unnamed part" if part is None else f"part {part!r}"


def as_parts(given: Any, parts: Sequence[str | None], what: str) -> dict[str | None, Any]:
    """``given`` by part; InvalidInput unless it is a mapping with exactly these parts."""
    if not isinstance(given, Mapping) or set(given) != set(parts):
        has = sorted(map(repr, given)) if isinstance(given, Mapping) else type(given).__name__
        raise InvalidInput(f"{what} must map each of the parts {parts!r}, and has {has}")
    return dict(given)


def steps_in_all(
    stores: Mapping[str | None, str], epoch: int | str, rewind_to: int | None, *, older: bool
) -> Generator[int, None, None]:
    """The epochs that are committed in all of these stores: ``epoch``, with ``older`` those before.

    NotFound, naming the part, when ``epoch`` is not in one of them, or a part was never saved.
    """
    from groupio.client.store_reader import StoreReader

    with ExitStack() as stack:
        readers = {}
        for part, path in stores.items():
            try:
                readers[part] = stack.enter_context(StoreReader.open(path))
            except NotFound as error:
                raise NotFound(f"{words(part)} was never saved: {error.message}") from None
        limit = rewind_to
        if isinstance(epoch, int):
            for part, reader in readers.items():
                if not any(_is_commit(opener) for _, opener in reader.candidates(epoch)):
                    raise NotFound(f"{words(part)}: {reader.not_found(epoch).message}", epoch=epoch)
            yield epoch
            limit = epoch - 1
        if epoch == "latest" or older:
            yield from _common(readers, limit)


def _common(readers: Mapping[str | None, StoreReader], limit: int | None) -> Iterator[int]:
    if limit is not None and limit < 0:
        return
    found = [dict(reader.candidates("latest", limit)) for reader in readers.values()]
    shared = set(found[0]).intersection(*found[1:])
    for number in sorted(shared, reverse=True):
        if all(_is_commit(openers[number]) for openers in found):
            yield number


def _is_commit(opener: Any) -> bool:
    try:
        return opener() is not None
    except DAMAGE:
        return True  # whoever loads it says what is wrong with it


def nothing_in_all(store: str, parts: Sequence[str | None]) -> NotFound:
    """The error when no epoch is committed in all of the parts."""
    names = ", ".join(map(words, parts))
    return NotFound(f"there is no epoch in {store} that is committed in all of {names}", path=store)


def load_parts(
    client: Client,
    parts: Iterable[str | None],
    epoch: int | str,
    *,
    into: Mapping[Any, Any] | None,
    member: int | None,
    deadline: float,
    fallback: bool,
) -> dict[Any, dict[str, Any]]:
    """See ``parts`` of :meth:`groupio.client.client.Client.load`; ``deadline`` is monotonic."""
    from groupio.client.loading import is_damage

    wanted = check_parts(parts)
    targets = {} if into is None else as_parts(into, wanted, "into")
    clients = {part: client if part is None else client._part(part) for part in wanted}
    nested = nesting.is_nested()
    if epoch == "latest":
        for one in clients.values():
            one._settle(deadline, nested)
    stores = {part: one.store for part, one in clients.items()}
    limits = [one._rewind_to for one in clients.values() if one._rewind_to is not None]
    skipped: list[tuple[int, str]] = []
    first_error: Exception | None = None
    with closing(steps_in_all(stores, epoch, min(limits, default=None), older=fallback)) as steps:
        for step in steps:
            try:
                found = _load_step(clients, step, targets, member, deadline, by_agent=not nested)
            except GroupIOError as error:
                if not fallback or not is_damage(error):
                    raise
                first_error = first_error or error
                skipped.append((step, error.message))
                continue
            if step != epoch:
                for one in clients.values():
                    one._origin.loaded(None)
            client.skipped_epochs = skipped
            return found
    raise first_error or nothing_in_all(client.store, wanted)


@nesting.call
def _load_step(
    clients: Mapping[str | None, Client],
    step: int,
    targets: Mapping[str | None, Any],
    member: int | None,
    deadline: float,
    *,
    by_agent: bool,
) -> dict[Any, dict[str, Any]]:
    """One step of all parts: no buffer is touched before all fit."""
    from groupio.client.loading import ItemsLoad, Request

    with ExitStack() as stack:
        loads = {}
        for part, one in clients.items():
            reader = stack.enter_context(one._open_reader())
            rank = one.rank if member is None else member
            request = Request(step, None, rank, None, targets.get(part), deadline)
            loads[part] = ItemsLoad(one, reader, reader.resolve(step), request)
        found = {part: load.read(by_agent=by_agent) for part, load in loads.items()}
        for load in loads.values():
            load.loaded()
        return found
