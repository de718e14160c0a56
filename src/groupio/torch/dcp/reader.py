"""``GroupStorageReader``: ``dcp.load`` from a store, onto any mesh and world size."""

from __future__ import annotations

import io
import os
import time
import weakref
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from groupio.client.address import store_address
from groupio.client.collection import collection_paused
from groupio.client.parts import Catalogue, Saved
from groupio.client.shared_read import GroupedRead
from groupio.client.store_parts import part_store
from groupio.client.store_reader import Fetch, StoreReader
from groupio.client.wants import Collector
from groupio.errors import GroupIOError, InvalidInput
from groupio.format.manifest import ManifestReader
from groupio.format.structure import Leaf
from groupio.model import DecisionKey, ItemKind
from groupio.plan.read import Box
from groupio.settings import Settings
from groupio.torch.clients import agent_read, client_for, note_loaded
from groupio.torch.converted import adopt
from groupio.torch.dcp.failure import for_all
from groupio.torch.dcp.names import epoch_of
from groupio.torch.flatten import taken_apart
from groupio.torch.grouped import Host
from groupio.torch.members import Members, find_members
from groupio.torch.saved import SavedState
from groupio.torch.sourcing import Take, take_of
from groupio.torch.taking import collect_take
from groupio.torch.tensors import as_integers

READ_S = 1800.0
"""Reading may take this long, in seconds."""


class _Source(NamedTuple):
    """An epoch that is open. ``who`` are its lineage, number and attempt."""

    reader: StoreReader
    manifest: ManifestReader
    parts: Catalogue
    who: tuple[int, int, int]


class _Ready(NamedTuple):
    """What a rank tells the coordinator with its plan: the epoch that it found, and its host."""

    who: tuple[int, int, int]
    where: dict[str, Any] | None


class _Together(NamedTuple):
    """What comes back: this rank's place among all, and the hosts of all."""

    rank: int
    where: list[dict[str, Any]]


class _Unreadable(Metadata):
    """What is had of an epoch that cannot be opened: any use raises why.

    Raised by ``read_metadata`` itself the error would be replaced by an AssertionError of DCP.
    """

    def __init__(self, error: GroupIOError) -> None:
        self._error = error

    @property
    def state_dict_metadata(self) -> Any:  # type: ignore[override]
        """Raises."""
        raise self._error


class GroupStorageReader(FileSystemReader):
    """Loads through groupio: ``dcp.load(sd, checkpoint_id="step-1000", storage_reader=r)``.

    The epoch is the integer at the end of ``checkpoint_id``; without one it is the newest that is
    committed. Reads what ``GroupStorageWriter``, ``groupio.torch.save`` and ``Client.save`` made,
    under DCP's names, onto any mesh and number of ranks; each rank gets only the chunks that it
    needs, every one verified before use, and no pickle. Chunks that several ranks of a host need
    are read from the store once and handed on, unless the load has ``no_dist=True``.

    Plain tensors and values that differ between the ranks belong to them: rank r gets rank r's.
    For a rank that saved none the name is missing, like one that nobody saved; the planner says so
    (``RuntimeError``). Dtypes are converted as torch's own reader does.

    What is wrong with the store or the epoch is NotFound, IntegrityError, FormatError or
    StorageError. ``dcp.load`` reports it on all ranks as ``CheckpointException``, which is no
    ``Exception``, with the typed errors in its ``failures[rank][0]``.

    With ``part`` what is loaded is that part, as ``GroupStorageWriter(store, part=...)`` saved it.

    ``process_group`` says which rank this process is (default: of the world of torch.distributed,
    else of the launcher), also for a load with ``no_dist=True``. ``fetch`` replaces the function
    that reads chunks; it is called once for each load, on every rank, which then reads by itself.

    ``bytes_read`` from the store and ``bytes_forwarded`` by other ranks, both in whole chunks, and
    ``notes`` are of the last load.
    """

    def __init__(
        self,
        store: str | os.PathLike[str],
        *,
        process_group: dist.ProcessGroup | None = None,
        fetch: Fetch | None = None,
        part: str | None = None,
    ) -> None:
        """InvalidInput when ``store`` is no path or ``file://`` URL, or ``part`` no name."""
        self._store = os.fspath(part_store(store_address(store), part))
        self._path = os.path.realpath(self._store)
        super().__init__(self._store)
        self._process_group = process_group
        self._fetch = fetch
        self._host: Host | None = None
        self.bytes_read = 0
        self.bytes_forwarded = 0
        self.notes: tuple[str, ...] = ()
        self._checkpoint_id = ""
        self._epoch: int | None = None
        self._source: _Source | None = None
        self._inside: dict[str, Any] = {}
        """The values of containers that were saved whole, by the names that DCP gives them."""

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Load ``checkpoint_id`` next; InvalidInput if it has no epoch."""
        super().reset(None)
        if checkpoint_id is not None:
            self._checkpoint_id = os.fspath(checkpoint_id)
            self._epoch = epoch_of(checkpoint_id)
        self._close()

    @property
    def checkpoint_id(self) -> str:
        """What was given last; the store before."""
        return self._checkpoint_id or self._store

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether it names an epoch."""
        try:
            epoch_of(checkpoint_id)
        except InvalidInput:
            return False
        return True

    # -- metadata --------------------------------------------------------------------------------

    # A parameter called "kwargs" would make DCP ask again, for a file of this rank alone, when
    # the first try fails on one rank; the ranks' collectives would no longer match.
    def read_metadata(self, *args: Any, **options: Any) -> Metadata:
        """The names, shapes and boxes of the epoch, as this rank sees it.

        When it cannot be opened, the first use of ``state_dict_metadata`` raises why: NotFound,
        IntegrityError, FormatError or StorageError.
        """
        try:
            return self._metadata(self._open())
        except GroupIOError as error:
            return _Unreadable(error)

    def _metadata(self, source: _Source) -> Metadata:
        members = find_members(self._process_group)
        state = SavedState(source.reader, source.manifest, members.rank, members.world_size)
        leaves = {leaf.name: leaf for leaf in state.tree().leaves()}
        found: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
        stored: dict[MetadataIndex, Saved | None] = {}
        paths: dict[str, tuple[str | int, ...]] = {}
        for name in dict.fromkeys(
            name for rank in source.parts.ranks() for name in source.parts.names_of(rank)
        ):
            boxes = _boxes(source.parts, name)
            if not boxes:
                continue
            leaf = leaves.get(name)
            if leaf is not None and leaf.whole:
                # DCP asks for each value in it by a name of its own.
                for inner in taken_apart(leaf.path, state.value(boxes[0])).leaves():
                    fqn = ".".join([str(step.key) for step in inner.path])
                    found[fqn] = BytesStorageMetadata()
                    paths[fqn] = _keys(inner)
                    stored[MetadataIndex(fqn)] = None
                    self._inside[fqn] = inner.value
                continue
            path = (name,) if leaf is None else _keys(leaf)
            paths[name] = path
            found[name] = _described(boxes, "" if leaf is None else leaf.note)
            if isinstance(found[name], BytesStorageMetadata):
                stored[MetadataIndex(name)] = None
            else:
                stored |= {MetadataIndex(name, one.box.offsets): one for one in boxes}
        return Metadata(
            state_dict_metadata=found,
            planner_data=paths,
            storage_data=stored,
            storage_meta=StorageMeta(checkpoint_id=self.checkpoint_id, load_id=self.load_id),
        )

    def _open(self) -> _Source:
        self._close()
        members = find_members(self._process_group)
        reader = StoreReader.open(self._path)
        try:
            manifest = reader.resolve("latest" if self._epoch is None else self._epoch)
            header = manifest.header
            parts = Catalogue(manifest, members.rank)
        except BaseException:
            reader.close()
            raise
        who = (header.lineage, header.epoch, header.attempt)
        self._source = _Source(reader, manifest, parts, who)
        weakref.finalize(self, reader.close)
        return self._source

    def _close(self) -> None:
        self._inside = {}
        source, self._source = self._source, None
        if source is not None:
            source.reader.close()
        host, self._host = self._host, None
        if host is not None:
            host.close()

    # -- planning --------------------------------------------------------------------------------

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Tell the coordinator which epoch this rank found, and how to reach it on its host."""
        assert self._source is not None
        where = None
        if self._fetch is None and dist.is_available() and dist.is_initialized():
            self._host = Host()
            weakref.finalize(self, self._host.close)
            where = self._host.where()
        plan.storage_data = _Ready(self._source.who, where)
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[Any]:
        """Tell every rank where all are; InvalidInput on all when they found different epochs."""
        ready = [plan.storage_data for plan in plans]
        errors = {
            rank: InvalidInput(
                f"rank 0 loads epoch {_words(ready[0])}, rank {rank} epoch {_words(one)}: give "
                "all ranks the same checkpoint_id"
            )
            for rank, one in enumerate(ready)
            if one.who != ready[0].who
        }
        if errors:
            return [for_all(errors)] * len(plans)
        where = [one.where for one in ready]
        for rank, plan in enumerate(plans):
            plan.storage_data = _Together(rank, where) if None not in where else None
        return plans

    # -- reading ---------------------------------------------------------------------------------

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill everything, in one read together with the other ranks of the host.

        IntegrityError for damage, StorageError when it cannot be read; what goes wrong on another
        rank of the host is raised too: GroupAborted, GroupTimeout or its own error, naming it.
        The tensors have undefined content after an error.
        """
        source = self._source
        assert source is not None
        deadline = time.monotonic() + READ_S
        through = None
        if self._fetch is None:
            through = agent_read(self._path, find_members(self._process_group))
        with self._together(plan) as grouped:
            by_agent = None if through is None else through.fetch_of(source.manifest)
            with grouped.fill(source.who[1], deadline):
                with collection_paused():
                    wants = Collector()
                    own_keys: dict[int, dict[str, Any]] = {}
                    finishes = [
                        self._want(source, item, planner, wants, own_keys) for item in plan.items
                    ]
                source.reader.read_wants(
                    source.manifest,
                    wants.finish(),
                    deadline=deadline,
                    threads=Settings.from_env().read_threads,
                    on_damage=self._report_damage,
                    fetch=self._fetch or by_agent or grouped.fetch,
                )
            took_part = (grouped,) if through is None else (grouped, through)
            self.bytes_read = sum(one.bytes_read for one in took_part)
            self.bytes_forwarded = sum(one.bytes_forwarded for one in took_part)
            self.notes = tuple(note for one in took_part for note in one.notes)
        for finish in finishes:
            finish()
        key = DecisionKey(*source.who) if self._epoch is not None else None
        note_loaded(self._path, find_members(self._process_group), key)
        self._close()
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _together(self, plan: LoadPlan) -> GroupedRead:
        """This rank's part in the reading of its host, by itself where nobody else loads."""
        together = plan.storage_data
        if self._host is None or not isinstance(together, _Together):
            return GroupedRead(None)
        self._host.link(together.rank, together.where)
        return self._host.reading_at_once()

    def _want(
        self,
        source: _Source,
        item: ReadItem,
        planner: LoadPlanner,
        wants: Collector,
        own_keys: dict[int, dict[str, Any]],
    ) -> Callable[[], None]:
        """Add what an item needs; the call completes it once the bytes are there."""
        if item.type is LoadItemType.BYTE_IO:
            name = item.storage_index.fqn
            if name in self._inside:
                inner = self._inside[name]
                return lambda: _hand_over(planner, item, inner, own_keys)
            taken = take_of(Leaf((), name=name), source.parts)
            if not isinstance(taken, Take):
                raise InvalidInput(f"{name!r} was not saved for this rank: {taken}")
            value = collect_take(taken, source.parts, wants)
            return lambda: _hand_over(planner, item, value(), own_keys)
        saved: Saved = self.storage_data[item.storage_index]
        target = planner.resolve_tensor(item).detach()
        corner = zip(saved.spec.offsets, item.storage_offsets, strict=True)
        box = Box(tuple(lo + at for lo, at in corner), tuple(item.lengths))
        if tuple(target.shape) != box.shape:
            raise InvalidInput(
                f"the planner gives a tensor of {list(target.shape)} for a part of "
                f"{list(box.shape)} of {item.storage_index.fqn!r}"
            )
        dtype = self._dtypes[item.storage_index.fqn]
        direct = target.dtype == dtype and target.is_cpu and not target.is_conj()
        direct = direct and not target.is_neg()
        place = target if direct else torch.empty(box.shape, dtype=dtype, device="cpu")
        wants.add_box(saved.spec, source.parts.rows(saved), box, as_integers(place).numpy())

        def finish() -> None:
            if not direct:
                target.copy_(place)
            planner.commit_tensor(item, target)

        return finish

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Take the metadata that :meth:`read_metadata` made; raises what it could not read."""
        _ = metadata.state_dict_metadata
        super().set_up_storage_reader(metadata, is_coordinator, *args, **kwargs)
        self._dtypes = {
            name: entry.properties.dtype
            for name, entry in metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
        }

    def _report_damage(self, digests: Any) -> None:
        members: Members = find_members(self._process_group)
        client_for(self._path, members)._report_damage(digests)


def _boxes(parts: Catalogue, name: str) -> list[Saved]:
    """The items that this rank reads the name from, its own ones first; none if it has none."""
    own = list(parts.own(name))
    if own and (own[0].spec.kind is not ItemKind.TENSOR or _is_whole(own[0])):
        return own[:1]
    found = parts.everyone(name)
    if found.differs and not own:
        return []
    return list(found.saved)


def _is_whole(saved: Saved) -> bool:
    return saved.spec.shape == saved.spec.global_shape


def _described(boxes: list[Saved], note: str) -> TensorStorageMetadata | BytesStorageMetadata:
    spec = boxes[0].spec
    if spec.kind is not ItemKind.TENSOR or spec.origin != "torch":
        return BytesStorageMetadata()
    chunks = [
        ChunkStorageMetadata(torch.Size(one.box.offsets), torch.Size(one.box.shape))
        for one in boxes
    ]
    properties = TensorProperties(dtype=getattr(torch, note or spec.dtype))
    return TensorStorageMetadata(properties, torch.Size(spec.global_shape), chunks)


def _keys(leaf: Leaf) -> tuple[str | int, ...]:
    """The path of a leaf as DCP writes it: keys of mappings are text."""
    return tuple(step.key if step.indexed else str(step.key) for step in leaf.path)


def _hand_over(
    planner: LoadPlanner, item: ReadItem, value: Any, known: dict[int, dict[str, Any]]
) -> None:
    """Give a value that is no tensor to the planner.

    torch's own planner is not asked where it would put a second key beside one that is no str,
    ``"5"`` beside ``5``; nor does the value need to be pickled then.
    """
    own = isinstance(planner, DefaultLoadPlanner) and planner.flatten_state_dict
    if not own or type(planner).load_bytes is not DefaultLoadPlanner.load_bytes:
        planner.load_bytes(item, _pickled(value))
        return
    assert isinstance(planner, DefaultLoadPlanner)
    fqn = item.dest_index.fqn
    here: Any = planner.original_state_dict
    path = planner.mappings[fqn]
    for key in path[:-1]:
        here = here[_own_key(here, key, known)]
    last = _own_key(here, path[-1], known)
    here[last] = adopt(here[last], value)


def _own_key(here: Any, key: Any, known: dict[int, dict[str, Any]]) -> Any:
    """The key of the container ``here`` that DCP writes as ``key``."""
    if not isinstance(here, Mapping) or key in here:
        return key
    if id(here) not in known:
        known[id(here)] = {str(own): own for own in here}
    return known[id(here)][key]


def _pickled(value: Any) -> io.BytesIO:
    """What a planner expects: ``torch.load`` gives the value back."""
    stream = io.BytesIO()
    torch.save(value, stream)
    stream.seek(0)
    return stream


def _words(ready: _Ready) -> str:
    lineage, epoch, attempt = ready.who
    return f"{epoch} (lineage {lineage}, attempt {attempt})"
