"""A load: the wanted epoch, or the next older one that is intact."""

from __future__ import annotations

import errno
import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from groupio.client.agent_read import through_agent
from groupio.client.chunk_reader import read_chunks
from groupio.client.store_reader import StoreReader
from groupio.errors import FormatError, GroupIOError, IntegrityError, StorageError
from groupio.format.manifest import ManifestReader
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
    names: Collection[str] | None
    into: Mapping[str, Any] | None
    deadline: float


class ItemsLoad:
    """The items of one member in one epoch: checked when it is made, then read.

    NotFound and InvalidInput are raised when it is made; no buffer of ``request`` is touched then.
    """

    def __init__(
        self, client: Client, reader: StoreReader, manifest: ManifestReader, request: Request
    ) -> None:
        self._client = client
        self._reader = reader
        self._manifest = manifest
        self._request = request
        self._planned = reader.plan_items(manifest, request.member, request.names, request.into)

    def read(self, *, by_agent: bool) -> dict[str, Any]:
        """Fill the buffers; chunks come through the agent where ``by_agent`` and it brings any."""
        through = through_agent(self._client) if by_agent else None
        self._reader.read_wants(
            self._manifest,
            self._planned.wants,
            deadline=self._request.deadline,
            threads=self._client.settings.read_threads,
            on_damage=self._client._report_damage,
            fetch=read_chunks if through is None else through.fetch_of(self._manifest),
        )
        return self._planned.finish()

    def loaded(self) -> None:
        """The client goes on from here, if the epoch was asked for by its number."""
        header = self._manifest.header
        key = DecisionKey(header.lineage, header.epoch, header.attempt)
        self._client._origin.loaded(key if header.epoch == self._request.epoch else None)


def load_items(
    client: Client,
    reader: StoreReader,
    request: Request,
    *,
    skipped: list[tuple[int, str]] | None,
    by_agent: bool,
) -> dict[str, Any]:
    """The items of one member; see :meth:`groupio.client.client.Client.load`.

    With a list ``skipped`` a damaged epoch is noted there and the next older one is tried; when
    none is intact, the error of the first stands for all. Without, damage raises at once.
    """
    first_error: GroupIOError | None = None
    candidates = reader.candidates(request.epoch, request.rewind_to, older=skipped is not None)
    for number, open_manifest in candidates:
        try:
            manifest = open_manifest()
            if manifest is not None:
                load = ItemsLoad(client, reader, manifest, request)
                items = load.read(by_agent=by_agent)
                load.loaded()
                return items
        except GroupIOError as error:
            if skipped is None or not is_damage(error):
                raise
            first_error = first_error or error
            log.warning("epoch %d is passed over: %s", number, error.message)
            skipped.append((number, error.message))
    raise first_error or reader.not_found(request.epoch, request.rewind_to)


def is_damage(error: GroupIOError) -> bool:
    """Whether an older epoch may be intact where this one is not.

    A device that cannot read some sectors is damage; a store that is away is not.
    """
    if isinstance(error, StorageError):
        return error.errno == errno.EIO
    return isinstance(error, (IntegrityError, FormatError))
