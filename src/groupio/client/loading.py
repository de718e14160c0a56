"""A load: the wanted epoch, or the next older one that is intact."""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from groupio.client.agent_read import through_agent
from groupio.client.chunk_reader import read_chunks
from groupio.client.store_reader import StoreReader
from groupio.errors import FormatError, GroupIOError, IntegrityError, StorageError
from groupio.model import DecisionKey

if TYPE_CHECKING:
    from groupio.client.client import Client

log = logging.getLogger("groupio.client")


@dataclass(frozen=True, slots=True)
class Request:
    """What to load; ``deadline`` is a reading of ``time.monotonic``."""

    epoch: int | str
    rewind_to: int | None
    member: int
    names: Iterable[str] | None
    into: Mapping[str, Any] | None
    deadline: float


def load_items(
    reader: StoreReader,
    request: Request,
    *,
    threads: int | None,
    skipped: list[tuple[int, str]] | None,
    on_damage: Callable[[Sequence[bytes]], None],
    client: Client,
    by_agent: bool,
) -> dict[str, Any]:
    """The items of one member; see :meth:`groupio.client.client.Client.load`.

    With a list ``skipped`` a damaged epoch is noted there and the next older one is tried; when
    none is intact, the error of the first stands for all. Without, damage raises at once.
    With ``by_agent`` chunks come through the agent of ``client``, where that brings any.
    """
    through = through_agent(client) if by_agent else None
    names = request.names
    names = names if names is None or isinstance(names, str) else list(names)
    first_error: GroupIOError | None = None
    candidates = reader.candidates(request.epoch, request.rewind_to, older=skipped is not None)
    for number, open_manifest in candidates:
        try:
            manifest = open_manifest()
            if manifest is not None:
                items = reader.read_items(
                    manifest,
                    request.member,
                    names,
                    request.into,
                    deadline=request.deadline,
                    threads=threads,
                    on_damage=on_damage,
                    fetch=read_chunks if through is None else through.fetch_of(manifest),
                )
                header = manifest.header
                key = DecisionKey(header.lineage, header.epoch, header.attempt)
                client._origin.loaded(key if number == request.epoch else None)
                return items
        except (IntegrityError, FormatError, StorageError) as error:
            # A device that cannot read some sectors is damage; a store that is away is not.
            if isinstance(error, StorageError) and error.errno != errno.EIO:
                raise
            if skipped is None:
                raise
            first_error = first_error or error
            log.warning("epoch %d is passed over: %s", number, error.message)
            skipped.append((number, error.message))
    raise first_error or reader.not_found(request.epoch, request.rewind_to)
