"""``groupio.torch.load``: one epoch, the same on all members, into a state dict in place."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Generator, Iterator, Mapping, MutableMapping, Sequence
from contextlib import ExitStack, closing, contextmanager, nullcontext
from dataclasses import dataclass
from types import TracebackType
from typing import Any, NamedTuple, Self

import torch.distributed as dist

import groupio
from groupio.client import nesting
from groupio.client.agent_read import AgentRead, through_agent
from groupio.client.ahead import expect_save
from groupio.client.arguments import check_epoch
from groupio.client.chunk_reader import read_chunks
from groupio.client.collection import collection_paused
from groupio.client.foreground import set_aside
from groupio.client.shared_read import GroupedRead
from groupio.client.store_parts import (
    as_parts,
    check_parts,
    nothing_in_all,
    part_store,
    steps_in_all,
)
from groupio.client.store_reader import Fetch, StoreReader
from groupio.client.wants import Collector
from groupio.errors import (
    FormatError,
    GroupAborted,
    GroupIOError,
    GroupTimeout,
    IntegrityError,
    InvalidInput,
    NotFound,
    from_wire,
    to_wire,
)
from groupio.format.codec import Converted
from groupio.format.manifest import ManifestReader
from groupio.format.structure import Branch, path_text
from groupio.model import DecisionKey
from groupio.torch.clients import check_store, client_for, note_loaded
from groupio.torch.collective_read import CollectiveRead
from groupio.torch.converted import ConvertedNotes, adopt
from groupio.torch.grouped import Host
from groupio.torch.matching import Matching, Template, staged_bytes, template_of
from groupio.torch.members import Council, Members, find_members
from groupio.torch.report import LoadReport, SkippedEpoch, joined
from groupio.torch.saved import SavedState
from groupio.torch.taking import Finish, collect_fills, collect_take, take
from groupio.torch.tensors import check_no_fake_mode
from groupio.torch.wholes import like, merged

AGREE_S = 600.0
"""All members have to come to the load within this time, in seconds."""

TELL_S = 15.0
"""A rank that cannot load waits so long for the others to tell them why, in seconds."""

READ_S = 1800.0
"""Reading may take this long, in seconds."""

APPEAR_S = 60.0
"""A network file system may show a manifest to this node so much later than to rank 0's."""

_DAMAGE = (IntegrityError, FormatError)


def load(
    state_dict: dict[Any, Any],
    store: str | os.PathLike[str],
    *,
    step: int | str = "latest",
    process_group: dist.ProcessGroup | None = None,
    strict: bool = True,
    fallback: bool = False,
    parts: Sequence[str | None] | None = None,
) -> LoadReport:
    """Fill ``state_dict`` with epoch ``step`` of ``store``, whatever mesh and world saved it.

    Tensors and the local parts of DTensors are filled in place, from the parts that any ranks
    saved; plain values (None too) are replaced in the dicts and lists given, and take the whole
    saved subtree, in which sharded tensors are put together. What differs between the ranks
    without a DTensor saying so (plain tensors, plain values) belongs to them: rank r gets rank
    r's, and a rank that saved none gets it only when all that did agree, else it is missing.

    Every rank of ``process_group`` (default: the world of torch.distributed) has to call it: rank
    0 decides for all what "latest" is, and no rank returns before all have their values. Without
    an initialised process group each process decides alone.

    ``strict``: names, shapes and dtypes must match both ways, else StateMismatch lists every
    difference and nothing has been touched; otherwise missing and unexpected names are only
    reported (shapes and dtypes must match always). Missing is what no rank saved; unexpected is
    what this rank saved and does not load, after a change of world size what no rank loads.
    ``fallback``: a damaged epoch is passed over for the newest intact one before it, on all ranks.
    ``parts``: ``state_dict`` has a state dict for each of these parts (None: the unnamed one); all
    are filled from the newest step that is committed in all of them, once all are known to fit.

    Raises on all ranks what went wrong on any: StateMismatch, NotFound, IntegrityError (after
    which the tensors have undefined content), StorageError, GroupTimeout naming ranks that did
    not come, InvalidInput. An optimizer that has not stepped has no state to be filled: get the
    dicts from ``torch.distributed.checkpoint.state_dict.get_state_dict`` and hand them back with
    ``set_state_dict``.
    """
    check_no_fake_mode("groupio.torch.load")
    nested = nesting.is_nested() or nesting.is_inside(load)
    if nested and (members := find_members(process_group)).world_size > 1:
        raise InvalidInput(
            f"rank {members.rank} called load inside another call of groupio, in a signal handler "
            "or callback, where the ranks cannot agree; load after that call"
        )
    how: dict[str, Any] = {"process_group": process_group, "strict": strict, "nested": nested}
    if parts is not None:
        return _load_parts(state_dict, store, step, parts, fallback=fallback, **how)
    return _load_one(state_dict, store, step, fallback=fallback, **how)


def _load_one(
    state_dict: dict[Any, Any],
    store: str | os.PathLike[str],
    step: int | str,
    *,
    process_group: dist.ProcessGroup | None,
    strict: bool,
    nested: bool,
    fallback: bool,
) -> LoadReport:
    asked = {"step": step, "strict": strict, "fallback": fallback}
    with _quiet(nested), _opened(state_dict, store, asked, process_group) as epoch:
        while True:
            epoch.check()
            if epoch.fill():
                return epoch.finish()


@contextmanager
def _quiet(nested: bool) -> Iterator[None]:
    """Within it this process waits for a load."""
    # A nested call sends nothing over the connection that it may have interrupted.
    with collection_paused(), nullcontext() if nested else set_aside():
        yield


def _requested(
    state_dict: dict[Any, Any], store: str | os.PathLike[str], asked: dict[str, Any]
) -> _Request | GroupIOError:
    """What this rank is called to load, or what is wrong with it."""
    try:
        check_store(store)
        template = template_of(state_dict)
        return _Request(template, asked | {"step": _checked_step(asked["step"])})
    except GroupIOError as error:
        return error


def _meet(members: Members, request: object) -> Council:
    """Meet the others; a rank whose own call is wrong does not wait long to tell them so."""
    if not isinstance(request, GroupIOError):
        return Council.meet(members, AGREE_S, "load")
    try:
        return Council.meet(members, min(TELL_S, AGREE_S), "load")
    except GroupTimeout:
        raise request from None


def _load_parts(
    state_dict: dict[Any, Any],
    store: str | os.PathLike[str],
    step: int | str,
    parts: Sequence[str | None],
    *,
    process_group: dist.ProcessGroup | None,
    strict: bool,
    nested: bool,
    fallback: bool,
) -> LoadReport:
    """Load all parts from the newest step that rank 0 finds committed, and all find intact."""
    stores: dict[str | None, Any] = {}
    mine: dict[str, Any] | GroupIOError
    try:
        wanted, step = check_parts(parts), _checked_step(step)
        as_parts(state_dict, wanted, "state_dict")
        stores = {part: part_store(store, part) for part in wanted}
        mine = {"step": step, "parts": list(wanted), "fallback": fallback}
    except GroupIOError as error:
        mine = error
    council = _meet(find_members(process_group), mine)
    steps = _StepsInAll(store, stores, council.members, fallback)
    with closing(steps), _quiet(nested):
        while True:
            number = council.decide(mine, steps.choose)["step"]
            asked = {"step": number, "strict": strict, "fallback": False}
            try:
                reports = _load_step(state_dict, stores, asked, process_group)
            except _DAMAGE as error:
                if not fallback:
                    raise
                steps.pass_over(number, error)
                continue
            if number != step:
                for one in stores.values():
                    note_loaded(one, council.members, None)
            return joined(number, reports, steps.skipped)


def _load_step(
    state_dict: dict[Any, Any],
    stores: Mapping[str | None, Any],
    asked: dict[str, Any],
    process_group: dist.ProcessGroup | None,
) -> list[tuple[str | None, LoadReport]]:
    """One step of all parts: none is touched before all fit, on all members."""
    with ExitStack() as stack:
        epochs = {
            part: stack.enter_context(_opened(state_dict[part], one, asked, process_group))
            for part, one in stores.items()
        }
        for epoch in epochs.values():
            epoch.check()
        for epoch in epochs.values():
            epoch.fill()
        return [(part, epoch.finish()) for part, epoch in epochs.items()]


class _StepsInAll:
    """Rank 0's part: which step of several parts all load, and which one next."""

    def __init__(
        self,
        store: str | os.PathLike[str],
        stores: Mapping[str | None, Any],
        members: Members,
        fallback: bool,
    ) -> None:
        self.skipped: list[SkippedEpoch] = []
        self._store = os.fspath(store)
        self._stores = stores
        self._members = members
        self._fallback = fallback
        self._first_error: GroupIOError | None = None
        self._found: Generator[int, None, None] | None = None

    def choose(self, opinions: list[dict[str, Any]]) -> dict[str, Any]:
        """The next step; NotFound, or the damage of the first one, when there is none."""
        if self._found is None:
            _check_alike(opinions)
            self._found = self._begin(opinions[0]["step"])
        number = next(self._found, None)
        if number is None:
            raise self._first_error or nothing_in_all(self._store, list(self._stores))
        return {"step": number}

    def _begin(self, step: int | str) -> Generator[int, None, None]:
        clients = {
            part: client_for(one, self._members, connected=False)
            for part, one in self._stores.items()
        }
        if step == "latest":
            for client in clients.values():
                client._settle(time.monotonic() + AGREE_S, nesting.is_nested())
        places = {part: client.store for part, client in clients.items()}
        return steps_in_all(places, step, None, older=self._fallback)

    def pass_over(self, number: int, error: GroupIOError) -> None:
        """The step is damaged in one of the parts."""
        self._first_error = self._first_error or error
        self.skipped.append(SkippedEpoch(number, error.message))

    def close(self) -> None:
        """Close the stores of the parts."""
        if self._found is not None:
            self._found.close()


@contextmanager
def _opened(
    state_dict: dict[Any, Any],
    store: str | os.PathLike[str],
    asked: dict[str, Any],
    process_group: dist.ProcessGroup | None,
) -> Iterator[_GroupLoad]:
    """Meet the other members and choose the epoch with them."""
    request = _requested(state_dict, store, asked)
    council = _meet(find_members(process_group), request)
    members = council.members
    by_group = False
    job: _Load | GroupIOError
    said: Any
    try:
        if isinstance(request, GroupIOError):
            raise request
        client = client_for(store, members, connected=False)
        job = _Load(request.template, client, members, asked["strict"])
        said = dict(request.asked)
        by_group = client.settings.fabric == "torch" and not council.alone
        if by_group:
            job.read_by(CollectiveRead(council.beside("exchange", READ_S), process_group))
            said["fabric"] = "torch"
    except GroupIOError as error:
        job = said = error
    chooser = _Chooser(job, asked["fallback"])
    open_job = job if isinstance(job, _Load) else nullcontext()
    with Host(council.alone or by_group) as host, open_job:
        mine = {"asked": said, "where": host.where()} if isinstance(job, _Load) else job
        try:
            choice = council.decide(mine, chooser.first)
        except NotFound:
            if isinstance(job, _Load):
                job.expect_save()
            raise
        assert isinstance(job, _Load)  # an error of this rank was raised by decide
        host.link(members.rank, choice["where"])
        yield _GroupLoad(job, host, council, chooser, choice, asked["step"], by_group)


@dataclass(slots=True)
class _GroupLoad:
    """The load of one store by all members: each of its steps ends with a decision of them all."""

    job: _Load
    host: Host
    council: Council
    chooser: _Chooser
    choice: dict[str, Any]
    asked: int | str
    by_group: bool

    def check(self) -> None:
        """Plan to fill this member from the chosen epoch. Nothing is touched.

        Returns when every member knows that it can be filled.
        """
        job = self.job
        while True:
            self.council.deadline_s = AGREE_S
            ready = job.opinion(job.check, self.choice)
            if not isinstance(ready, GroupIOError):
                ready["linked"] = self.host.linked()
                direct = self.by_group or nesting.is_nested()
                ready["agent"] = not direct and through_agent(job.client) is not None
            self.choice = self.council.decide(ready, self.chooser.checked)
            job.join(self.host, self.choice["linked"])
            if not self.choice["again"]:
                job.heard(self.choice)
                return

    def fill(self) -> bool:
        """Read everything; False when an older epoch was chosen because this one is damaged."""
        self.council.deadline_s = READ_S
        mine = self.job.opinion(self.job.fill, self.choice)
        self.choice = self.council.decide(mine, self.chooser.next)
        return not self.choice["again"]

    def finish(self) -> LoadReport:
        """Put the plain values into the dicts and lists of the caller."""
        key = DecisionKey(*self.choice["key"])
        self.job.client._origin.loaded(key if key.epoch == self.asked else None)
        return self.job.finish(self.choice)


class _Request(NamedTuple):
    """What a rank is called to fill, and how."""

    template: Template
    asked: dict[str, Any]


class _Load:
    """The load of one member."""

    def __init__(
        self,
        template: Template,
        client: groupio.Client,
        members: Members,
        strict: bool,
    ) -> None:
        self.client = client
        self.strict = strict
        self._members = members
        self._template = template
        self._reader: StoreReader | None = None
        self._manifest: ManifestReader | None = None
        self._matching = Matching()
        self._unexpected: list[str] = []
        self._wants = Collector()
        self._arrivals: list[Finish] = []
        self._new: dict[str, Finish] = {}
        self._values: dict[str, Any] = {}
        self._converted: dict[str, list[Converted]] = {}
        self._notes: list[str] = []
        self._grouped: GroupedRead | CollectiveRead | None = None
        self._through: AgentRead | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._grouped is not None:
            self._grouped.close()
        if self._reader is not None:
            self._reader.close()

    def reader(self) -> StoreReader:
        """The store, open until the end of the load."""
        if self._reader is None:
            self._reader = self.client._open_reader()
        return self._reader

    def read_by(self, grouped: CollectiveRead) -> None:
        """Read with all other ranks, by their process group."""
        self._grouped = grouped

    def join(self, host: Host, linked: list[dict[str, Any]]) -> None:
        """Read with the others of the host from now on."""
        if self._grouped is None:
            self._grouped = host.reading(linked)

    def opinion(
        self, work: Callable[[dict[str, Any]], dict[str, Any]], choice: dict[str, Any]
    ) -> dict[str, Any] | GroupIOError:
        """Do ``work``; what this member tells the council of how it went."""
        try:
            return work(choice)
        except _DAMAGE as error:
            return {"damage": to_wire(error)}
        except GroupIOError as error:
            return error
        except Exception as error:  # noqa: BLE001  the others must not wait for this member
            rank = self._members.rank
            failed = GroupAborted(
                f"rank {rank} cannot load epoch {choice['key'][1]}: {type(error).__name__}: "
                f"{error}; see its output",
                members=[rank],
                epoch=choice["key"][1],
            )
            failed.__cause__ = error
            return failed

    def check(self, choice: dict[str, Any]) -> dict[str, Any]:
        """Compare the template with the chosen epoch, and plan what to read for it.

        StateMismatch when it does not fit. After a change of world size only all members
        together know what is unexpected: each says what it does not load.
        """
        reader = self.reader()
        manifest = self._manifest = _appeared(reader, DecisionKey(*choice["key"]))
        saved = SavedState(reader, manifest, self._members.rank, self._members.world_size)
        found = self._matching = saved.match(self._template)
        self._unexpected = found.unexpected
        asked = not saved.same_world and not found.different
        asked = asked and not (self.strict and found.missing)
        if asked:
            found.unexpected = []
        mismatch = found.mismatch(self.strict, self.where(choice))
        if mismatch is not None:
            raise mismatch
        wants = self._wants = Collector()
        self._arrivals = collect_fills(found.fill.values(), saved.parts, wants)
        self._converted = {name: [] for name in found.take} | found.converted
        self._new = {
            name: collect_take(take, saved.parts, wants, self._converted[name])
            for name, take in found.take.items()
        }
        self._notes = saved.notes(node for _, node in found.replace)
        return {"unexpected": self._unexpected} if asked else {}

    def where(self, choice: dict[str, Any]) -> str:
        """The epoch in words."""
        return f"epoch {choice['key'][1]} of {self.client.store}"

    def fill(self, choice: dict[str, Any]) -> dict[str, Any]:
        """Read everything, in one call: other members may wait for its part of the work."""
        assert self._reader is not None
        assert self._manifest is not None
        assert self._grouped is not None
        deadline = time.monotonic() + READ_S
        fetch: Fetch = self._grouped.fetch
        if choice["load"]:
            # By their agents all nodes read together; the ranks of a host need not as well.
            self._through = through_agent(self.client, choice["load"], self._members.world_size)
            through = self._through
            fetch = read_chunks if through is None else through.fetch_of(self._manifest)
        with self._grouped.fill(choice["key"][1], deadline):
            self._reader.read_wants(
                self._manifest,
                self._wants.finish(),
                deadline=deadline,
                threads=self.client.settings.read_threads,
                on_damage=self.client._report_damage,
                fetch=fetch,
            )
        for arrive in self._arrivals:
            arrive()
        self._values = {name: decoded() for name, decoded in self._new.items()}
        return {}

    def expect_save(self) -> None:
        """Get ready, in the background, for the first save of what this load was to fill."""
        expect_save(self.client, staged_bytes(self._template))

    def heard(self, choice: dict[str, Any]) -> None:
        """What the others do not load either is unexpected."""
        if "unexpected" in choice:
            self._unexpected = choice["unexpected"]

    def finish(self, choice: dict[str, Any]) -> LoadReport:
        """Put the plain values into the given dicts and lists."""
        for leaf, node in self._matching.replace:
            leaf.value = adopt(leaf.value, take(node, self._values))
        for state, metadata in self._matching.versions:
            if hasattr(state, "_metadata"):
                state._metadata = metadata
        for whole, value in self._matching.merge:
            whole.value = merged(whole.value, value)
        replaced = {id(leaf) for leaf, _ in self._matching.replace}
        replaced |= {id(whole) for whole, _ in self._matching.merge}
        _write_back(self._template.root, replaced)
        self.expect_save()
        assert self._grouped is not None
        through = self._through
        took_part = (self._grouped,) if through is None else (self._grouped, through)
        return LoadReport(
            step=choice["key"][1],
            missing=tuple(self._matching.missing),
            unexpected=tuple(self._unexpected),
            skipped_epochs=tuple(SkippedEpoch(*one) for one in choice["skipped"]),
            bytes_read=sum(one.bytes_read for one in took_part),
            bytes_forwarded=sum(one.bytes_forwarded for one in took_part),
            notes=(*(note for one in took_part for note in one.notes), *self._type_notes()),
        )

    def _type_notes(self) -> list[str]:
        """What did not come back as what it was."""
        found = ConvertedNotes()
        for _, node in self._matching.replace:
            for branch in node.branches() if isinstance(node, Branch) else ():
                if branch.was:
                    found.add(path_text(branch.path), branch.was, branch.kind)
        for name, converted in self._converted.items():
            found.extend(name, converted)
        return self._notes + found.loaded()


class _Chooser:
    """Rank 0's part: which epoch all load, and which one next when it is damaged."""

    def __init__(self, job: _Load | GroupIOError, fallback: bool) -> None:
        self._job = job
        self._fallback = fallback
        self._key: DecisionKey | None = None
        self._skipped: list[tuple[int, str]] = []
        self._first_error: GroupIOError | None = None
        self._step: int | str = "latest"

    def first(self, opinions: list[dict[str, Any]]) -> dict[str, Any]:
        """The epoch to begin with; InvalidInput when the members ask for different things."""
        asked = [opinion["asked"] for opinion in opinions]
        _check_alike(asked)
        self._step = asked[0]["step"]
        assert isinstance(self._job, _Load)
        if self._step == "latest":
            self._job.client._settle(time.monotonic() + AGREE_S, nesting.is_nested())
        return self._choose() | {"where": [opinion["where"] for opinion in opinions]}

    def checked(self, opinions: list[dict[str, Any]]) -> dict[str, Any]:
        """Go on like :meth:`next`; StateMismatch when names are unexpected on all members."""
        verdict = self.next(opinions) | {"linked": [one["linked"] for one in opinions]}
        by_agents = not verdict["again"] and all(one["agent"] for one in opinions)
        verdict["load"] = os.urandom(8).hex() if by_agents else ""
        if verdict["again"] or "unexpected" not in opinions[0]:
            return verdict
        job = self._job
        assert isinstance(job, _Load)
        left = opinions[0]["unexpected"]
        for opinion in opinions[1:]:
            others = set(opinion["unexpected"])
            left = [name for name in left if name in others]
        mismatch = Matching(unexpected=left).mismatch(job.strict, job.where(verdict))
        if mismatch is not None:
            raise mismatch
        return verdict | {"unexpected": left}

    def next(self, opinions: list[dict[str, Any]]) -> dict[str, Any]:
        """Go on with this epoch, or take the next older one if a member found damage."""
        damage = [from_wire(opinion["damage"]) for opinion in opinions if "damage" in opinion]
        if not damage:
            return self._verdict(again=False)
        if not self._fallback:
            raise damage[0]
        assert self._key is not None
        self._pass_over(self._key.epoch, damage[0])
        return self._choose()

    def _choose(self) -> dict[str, Any]:
        assert isinstance(self._job, _Load)
        client = self._job.client
        older_than = None if self._key is None else self._key.epoch
        reader = self._job.reader()
        candidates = reader.candidates(self._step, client._rewind_to, older=self._fallback)
        for number, open_manifest in candidates:
            if older_than is not None and number >= older_than:
                continue
            try:
                manifest = open_manifest()
            except _DAMAGE as error:
                if not self._fallback:
                    raise
                self._pass_over(number, error)
                continue
            if manifest is not None:
                header = manifest.header
                self._key = DecisionKey(header.lineage, header.epoch, header.attempt)
                return self._verdict(again=True)
        raise self._first_error or reader.not_found(self._step, client._rewind_to)

    def _pass_over(self, epoch: int, error: GroupIOError) -> None:
        self._first_error = self._first_error or error
        self._skipped.append((epoch, error.message))

    def _verdict(self, *, again: bool) -> dict[str, Any]:
        assert self._key is not None
        key = (self._key.lineage, self._key.epoch, self._key.attempt)
        return {"key": list(key), "again": again, "skipped": [list(one) for one in self._skipped]}


def _appeared(reader: StoreReader, key: DecisionKey) -> ManifestReader:
    """The manifest that rank 0 chose, as soon as this node can see it."""
    end = time.monotonic() + APPEAR_S
    while True:
        manifest = reader.manifest(key)
        if manifest is not None:
            return manifest
        if time.monotonic() > end:
            raise NotFound(
                f"rank 0 chose epoch {key.epoch} and {reader.path} does not show it to this rank "
                f"after {APPEAR_S:.0f} s; is it the same file system on all nodes?",
                path=reader.path,
                epoch=key.epoch,
            )
        time.sleep(0.5)


def _checked_step(step: int | str) -> int | str:
    return step if step == "latest" else check_epoch(step, "step")


def _check_alike(asked: list[dict[str, Any]]) -> None:
    for rank, one in enumerate(asked):
        if one != asked[0]:
            raise InvalidInput(
                f"rank 0 loads with {_words(asked[0])}, rank {rank} with {_words(one)}; call "
                "load with the same arguments on all ranks"
            )


def _words(opinion: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in opinion.items())


def _write_back(branch: Branch, replaced: set[int]) -> bool:
    """Write replaced leaves into the containers of the caller; True when this one is new.

    A tuple cannot be changed: the container that holds it gets a new one.
    """
    changed = {}
    for key, child in branch.children.items():
        if id(child) in replaced or (isinstance(child, Branch) and _write_back(child, replaced)):
            changed[key] = child.value
    if not changed:
        return False
    if isinstance(branch.value, tuple):
        branch.value = like(branch.value, [child.value for child in branch.children.values()])
        return True
    if isinstance(branch.value, Mapping) and not isinstance(branch.value, MutableMapping):
        branch.value = {key: child.value for key, child in branch.children.items()}
        return True
    for key, value in changed.items():
        branch.value[key] = value
    return False
