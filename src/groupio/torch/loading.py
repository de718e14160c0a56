"""``groupio.torch.load``: one epoch, the same on all members, into a state dict in place."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Self

import torch.distributed as dist

import groupio
from groupio.client.arguments import check_epoch
from groupio.client.store_reader import StoreReader, member_layout
from groupio.errors import (
    FormatError,
    GroupAborted,
    GroupIOError,
    IntegrityError,
    InvalidInput,
    NotFound,
    from_wire,
    to_wire,
)
from groupio.format.manifest import ManifestReader
from groupio.format.structure import STRUCTURE, Branch, Leaf, decode_structure, make_container
from groupio.model import DecisionKey, MemberTable
from groupio.torch.clients import client_for
from groupio.torch.matching import Matching, Template, match, template_of
from groupio.torch.members import Council, Members, find_members
from groupio.torch.report import LoadReport, SkippedEpoch
from groupio.torch.taking import is_sharded, leaves_of, new_tensor, read_whole, take

AGREE_S = 600.0
"""All members have to come to the load within this time, in seconds."""

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
) -> LoadReport:
    """Fill ``state_dict`` with what this rank saved in epoch ``step`` of ``store``.

    Tensors and the local shards of DTensors are filled in place; plain values (None too) are
    replaced in the dicts and lists given, and take the whole saved subtree, in which sharded
    tensors are put together. This version loads onto the mesh and world size that saved.

    Every rank of ``process_group`` (default: the world of torch.distributed) has to call it: rank
    0 decides for all what "latest" is, and no rank returns before all have their values. Without
    an initialised process group each process decides alone.

    ``strict``: names, shapes and dtypes must match both ways, else StateMismatch lists every
    difference and nothing has been touched; otherwise missing and unexpected names are only
    reported (shapes and dtypes must match always). ``fallback``: a damaged epoch is passed over
    for the newest intact one before it, on all ranks.

    Raises on all ranks what went wrong on any: StateMismatch, NotFound, IntegrityError (after
    which the tensors have undefined content), StorageError, GroupTimeout naming ranks that did
    not come, InvalidInput. An optimizer that has not stepped has no state to be filled: get the
    dicts from ``torch.distributed.checkpoint.state_dict.get_state_dict`` and hand them back with
    ``set_state_dict``.
    """
    members = find_members(process_group)
    council = Council(members, "load", AGREE_S)
    job: _Load | GroupIOError
    try:
        job = _Load(state_dict, client_for(store, members), members, strict)
        mine: Any = {"step": _checked_step(step), "strict": strict, "fallback": fallback}
    except GroupIOError as error:
        job = mine = error
    chooser = _Chooser(job, fallback)
    choice = council.decide(mine, chooser.first)
    assert isinstance(job, _Load)  # an error of this rank was raised by decide
    with job:
        while True:
            # Nothing is touched before every member knows that it can be filled.
            council.deadline_s = AGREE_S
            choice = council.decide(job.opinion(job.check, choice), chooser.next)
            if choice["again"]:
                continue
            council.deadline_s = READ_S
            choice = council.decide(job.opinion(job.fill, choice), chooser.next)
            if not choice["again"]:
                return job.finish(choice)


class _Load:
    """The load of one member."""

    def __init__(
        self,
        state_dict: dict[Any, Any],
        client: groupio.Client,
        members: Members,
        strict: bool,
    ) -> None:
        self.client = client
        self._members = members
        self._strict = strict
        self._template: Template = template_of(state_dict)
        self._reader: StoreReader | None = None
        self._manifest: ManifestReader | None = None
        self._matching = Matching()
        self._values: dict[str, Any] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._reader is not None:
            self._reader.close()

    def opinion(
        self, work: Callable[[dict[str, Any]], None], choice: dict[str, Any]
    ) -> dict[str, Any] | GroupIOError:
        """Do ``work``; what this member tells the council of how it went."""
        try:
            work(choice)
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
        return {}

    def check(self, choice: dict[str, Any]) -> None:
        """Compare the template with the chosen epoch; StateMismatch when it does not fit."""
        if self._reader is None:
            self._reader = StoreReader.open(self.client.store)
        reader = self._reader
        self._manifest = _appeared(reader, DecisionKey(*choice["key"]))
        self._matching = self._match(reader, self._manifest)
        where = f"epoch {choice['key'][1]} of {reader.path}"
        mismatch = self._matching.mismatch(self._strict, where)
        if mismatch is not None:
            raise mismatch

    def _match(self, reader: StoreReader, manifest: ManifestReader) -> Matching:
        rank = self._members.rank
        if rank not in manifest.ranks:
            found = match(self._template, Branch((), "dict"), {}, lambda one, other: True)
            found.hints.append(
                f"rank {rank} is none of the {len(manifest.ranks)} ranks that saved; this version "
                "loads onto the world size that saved"
            )
            return found
        member = manifest.member(rank)
        specs = {spec.name: spec for spec in member.items}
        if STRUCTURE not in specs:
            raise InvalidInput(
                f"epoch {manifest.header.epoch} of {reader.path} was not saved by "
                "groupio.torch.save; read it with groupio.Client.load"
            )
        record = reader.read_items(manifest, rank, [STRUCTURE])[STRUCTURE]
        saved = decode_structure(record)
        if {leaf.name for leaf in saved.leaves()} != specs.keys() - {STRUCTURE}:
            raise IntegrityError(
                f"the structure record of rank {rank} and its items contradict each other",
                path=manifest.path,
                epoch=manifest.header.epoch,
            )
        same = _SameContent(manifest, member)
        return match(self._template, saved, specs, same)

    def fill(self, choice: dict[str, Any]) -> None:
        """Fill the tensors and read the plain values, which :meth:`finish` puts in place."""
        reader, manifest, rank = self._reader, self._manifest, self._members.rank
        assert reader is not None
        assert manifest is not None
        into: dict[str, Any] = {name: part.tensor for name, part in self._matching.fill.items()}
        taken = leaves_of(node for _, node in self._matching.replace)
        if not into and not taken:
            return
        specs = {spec.name: spec for spec in manifest.member(rank).items}
        whole = [leaf.name for leaf in taken if is_sharded(specs[leaf.name])]
        own = [leaf.name for leaf in taken if not is_sharded(specs[leaf.name])]
        names = [*into, *own]
        for name in own:
            made = new_tensor(specs[name])
            if made is not None:
                into[name] = made
        deadline, threads = time.monotonic() + READ_S, self.client.settings.read_threads
        self._values = reader.read_items(
            manifest,
            rank,
            names,
            into,
            deadline=deadline,
            threads=threads,
            on_damage=self.client._report_damage,
        )
        self._values |= read_whole(reader, manifest, whole, deadline, threads)

    def finish(self, choice: dict[str, Any]) -> LoadReport:
        """Put the plain values into the given dicts and lists."""
        for leaf, node in self._matching.replace:
            leaf.value = take(node, self._values)
        replaced = {id(leaf) for leaf, _ in self._matching.replace}
        _write_back(self._template.root, replaced)
        return LoadReport(
            step=choice["key"][1],
            missing=tuple(self._matching.missing),
            unexpected=tuple(self._matching.unexpected),
            skipped_epochs=tuple(SkippedEpoch(*one) for one in choice["skipped"]),
        )


class _SameContent:
    """Whether two items of a member consist of the same chunks."""

    def __init__(self, manifest: ManifestReader, member: MemberTable) -> None:
        self._member = member
        self._rows = {spec.name: row for row, spec in enumerate(member.items)}
        self._manifest = manifest

    def __call__(self, one: str, other: str) -> bool:
        layout = member_layout(self._manifest, self._member)
        chunks = [
            self._member.refs[slice(*layout.chunk_range(self._rows[name]))].tolist()
            for name in (one, other)
        ]
        return bool(chunks[0] == chunks[1])


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
        for rank, opinion in enumerate(opinions):
            if opinion != opinions[0]:
                raise InvalidInput(
                    f"rank 0 loads with {_words(opinions[0])}, rank {rank} with "
                    f"{_words(opinion)}; call load with the same arguments on all ranks"
                )
        self._step = opinions[0]["step"]
        assert isinstance(self._job, _Load)
        if self._step == "latest":
            self._job.client._settle(time.monotonic() + AGREE_S)
        return self._choose()

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
        with StoreReader.open(client.store) as reader:
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


def _words(opinion: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in opinion.items())


def _write_back(branch: Branch, replaced: set[int]) -> bool:
    """Write replaced leaves into the containers of the caller; True when this one is new.

    A tuple cannot be changed: the container that holds it gets a new one.
    """
    changed = {}
    for key, child in branch.children.items():
        if isinstance(child, Leaf):
            if id(child) in replaced:
                changed[key] = child.value
        elif _write_back(child, replaced):
            changed[key] = child.value
    if not changed:
        return False
    if branch.kind == "tuple":
        values = {key: child.value for key, child in branch.children.items()}
        branch.value = make_container("tuple", values)
        return True
    for key, value in changed.items():
        branch.value[key] = value
    return False
