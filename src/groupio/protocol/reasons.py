"""Errors with which the protocol refuses a member or gives a group up: one clear sentence each."""

from __future__ import annotations

import errno
from collections.abc import Mapping, Sequence
from math import inf
from typing import Any

from groupio.errors import (
    AgentLost,
    ControllerLost,
    EpochConflict,
    GroupAborted,
    GroupIOError,
    GroupTimeout,
    IntegrityError,
    InvalidInput,
    LateMember,
    LevelUnreachable,
    NotFound,
    Outcome,
    StagingFull,
    StaleEpoch,
    StorageError,
)
from groupio.model import EPOCH_MAX, REPLICAS_MAX, WORLD_SIZE_MAX, DecisionKey, Level, Lineage
from groupio.plan.grouped import Missing
from groupio.protocol import effects as fx
from groupio.protocol import events as ev

WHEN_FULL = ("wait", "skip", "fail")
DOORS = ("", "dcp")

_AWAY = frozenset(
    (
        errno.ENOTCONN,
        errno.ECONNABORTED,
        errno.ECONNREFUSED,
        errno.ECONNRESET,
        errno.ESHUTDOWN,
        errno.ETIMEDOUT,
        errno.EHOSTDOWN,
        errno.EHOSTUNREACH,
        errno.ENETUNREACH,
        errno.ESTALE,
        errno.ENODEV,
        errno.EREMCHG,
    )
)
"""Errors of a store that cannot be reached now, as of a file server that is being restarted.

The ECONN ones are of FUSE mounts whose process or whose server is gone, ESHUTDOWN is of Lustre and
Ceph. EIO is not one of them: a broken disk says the same, and must not be waited for.

EREMCHG: its path leads to something else, as when it is not mounted any more."""

_SHOWN_MAX = 16
"""So many ranks are written out; of thousands, the count is enough."""


def other_job(event: ev.MemberOpened, owner: str) -> InvalidInput:
    """The store belongs to another job than the member said."""
    return InvalidInput(
        f"Rank {event.rank} saves for job {event.job!r}, but this store belongs to job {owner!r}; "
        "give each job a store of its own, or leave job out."
    )


def ranks(numbers: tuple[int, ...]) -> str:
    """The ranks, the first of them written out."""
    shown = ", ".join(map(str, numbers[:_SHOWN_MAX]))
    more = len(numbers) - _SHOWN_MAX
    return shown if more <= 0 else f"{shown} and {more} more"


# -- an open is refused ---------------------------------------------------------


def absurd(event: ev.MemberOpened) -> InvalidInput | None:
    """What no member can mean, or None."""
    if not 0 < event.world_size <= WORLD_SIZE_MAX:
        wrong = f"world size {event.world_size} is not between 1 and {WORLD_SIZE_MAX}"
    elif not 0 <= event.rank < event.world_size:
        wrong = f"rank {event.rank} is not between 0 and {event.world_size - 1}"
    elif not 0 <= event.epoch <= EPOCH_MAX:
        wrong = f"epoch {event.epoch} is not between 0 and {EPOCH_MAX}"
    elif not 0 < event.deadline_s < inf:
        wrong = f"deadline_s={event.deadline_s} is not a number of seconds above 0"
    elif event.when_full not in WHEN_FULL:
        wrong = f"when_full={event.when_full!r} is not one of {', '.join(WHEN_FULL)}"
    elif not 0 < event.replicas <= REPLICAS_MAX:
        wrong = f"replicas={event.replicas} is not between 1 and {REPLICAS_MAX}"
    elif event.door not in DOORS:
        wrong = f"door={event.door!r} is not known to this release, only 'dcp' is"
    else:
        return None
    return InvalidInput(f"Rank {event.rank} cannot save: {wrong}.")


def draining(epoch: int) -> AgentLost:
    """The agent takes nothing new."""
    return AgentLost(
        f"The agent is draining and takes no new save of epoch {epoch}; call save again, a new "
        "agent is started for it.",
        outcome=Outcome.NOT_COMMITTED,
    )


def crowded(epoch: int, waiting: int) -> StorageError:
    """Too many opens wait for the store already."""
    return StorageError(
        f"The store did not answer yet and {waiting} save(s) wait for it, so epoch {epoch} is not "
        "taken; look at the store, then save again."
    )


def unanswered(event: ev.MemberOpened) -> GroupTimeout:
    """The store was not open before the deadline."""
    return GroupTimeout(
        f"Epoch {event.epoch} was not staged within {event.deadline_s:g} s: the store did not "
        "answer. Look at the store, or give a longer deadline_s.",
        epoch=event.epoch,
    )


def rewinding(event: ev.MemberOpened, epoch: object = "E") -> str:
    """The call that begins a new line after ``epoch``, on the side from which the member saved."""
    call = {"torch": "groupio.torch.save", "dcp": "GroupStorageWriter"}.get(event.side, "connect")
    return f"{call}(rewind_to={epoch})"


def stale(event: ev.MemberOpened, newest: int) -> StaleEpoch:
    """Epochs only grow within a lineage."""
    return StaleEpoch(
        f"Epoch {event.epoch} is older than epoch {newest} of this lineage; save a newer epoch, or "
        f"{rewinding(event)} to start a new line after an older epoch E.",
        epoch=event.epoch,
        latest=newest,
    )


def other_view(node: str, its: str, ours: str) -> StorageError:
    """The node does not see what the controller writes, or the other way round."""
    return StorageError(
        f"The store {its} of node {node} is not the store {ours} of the job's controller, although "
        "both have the same id: a file that one of them made is not there, or differs, for the "
        "other. One store is a copy, or another file system is mounted there; let all nodes use "
        "the same file system, then save again.",
        path=its,
    )


def other_directory(node: str, path: str) -> StorageError:
    """A path leads a client to another directory than the agent of its node."""
    return StorageError(
        f"{path} leads this process to another directory than the agent of node {node}, which "
        "would save to the one that it sees. They are in different containers or mount "
        "namespaces: mount the store at this path for both, or give the process an agent of its "
        "own (another GROUPIO_RUNTIME_DIR).",
        path=path,
        errno=errno.EREMCHG,
    )


def copied_store(path: str, other: str) -> StorageError:
    """Two stores with one id are in use on a node; a job of several nodes is found by the id."""
    return StorageError(
        f"The stores {path} and {other} have the same id, and are different directories: one is a "
        f"copy of the other, and {other} is in use on this node. Save to that one on all ranks; or "
        f"load from {path}, which works as before, and save to a new path.",
        path=path,
    )


def split_over_copies(ranks: tuple[int, ...], theirs: str, ours: str) -> str:
    """Added to the error of a group whose missing ranks use a copy of its store."""
    who = "Rank" if len(ranks) == 1 else "Ranks"
    return (
        f" {who} {', '.join(map(str, ranks))} came with {theirs}, a copy of {ours}: let all ranks "
        "use one of the two."
    )


def _origin(event: ev.MemberOpened) -> str:
    if event.begin_after is not None:
        return f"goes on after epoch {event.begin_after} (rewind_to)"
    if event.resumed_from is None:
        return "goes on after no older epoch"
    return f"goes on after epoch {event.resumed_from.epoch}, which it loaded"


def other_origin(a: ev.MemberOpened, b: ev.MemberOpened) -> InvalidInput:
    """Members would follow different lines."""
    return InvalidInput(
        f"With epoch {a.epoch} rank {a.rank} {_origin(a)}, and rank {b.rank} {_origin(b)}; load "
        f"the same epoch on all ranks, or give all {rewinding(b)}."
    )


def not_ended(
    event: ev.MemberOpened, newest: int, rank: int, process: ev.Process, how: str
) -> StaleEpoch:
    """Another incarnation may still write to the line that the save would abandon."""
    assert event.resumed_from is not None
    after = event.resumed_from.epoch
    return StaleEpoch(
        f"Epoch {event.epoch} would go on after epoch {after}, which was loaded, and abandon the "
        f"epochs up to {newest}, but rank {rank} (pid {process.pid}) of another incarnation {how}. "
        f"End it and save again, or use {rewinding(event, after)} if it has ended.",
        epoch=event.epoch,
        latest=newest,
    )


def new_line(event: ev.MemberOpened, line: Lineage, newest: int) -> str:
    """A note: the save began a new lineage."""
    return (
        f"lineage: epoch {event.epoch} goes on after epoch {line.after_epoch} and begins lineage "
        f"{line.number}; the epochs after {line.after_epoch} up to {newest} are abandoned"
    )


def lost_peers(epoch: int, gone: tuple[int, ...]) -> GroupAborted:
    """Members that the group needs will never come."""
    return GroupAborted(
        f"Rank(s) {ranks(gone)} of this job ended, so epoch {epoch} cannot be saved by the whole "
        "group; restart the job from its latest epoch.",
        members=gone,
        epoch=epoch,
    )


def late(event: ev.MemberOpened, its: int, now: int) -> LateMember:
    """The member belongs to an earlier life of the job."""
    return LateMember(
        f"Rank {event.rank} (pid {event.process.pid}) belongs to incarnation {its}, the job is at "
        f"{now}; end this process.",
        member=event.rank,
        epoch=event.epoch,
    )


def replaced(event: ev.MemberOpened, now: int) -> LateMember:
    """The member belongs to a set of processes that another one replaced."""
    return LateMember(
        f"Rank {event.rank} (pid {event.process.pid}) belongs to processes that others replaced as "
        f"the members of this job, which is at incarnation {now}; end this process.",
        member=event.rank,
        epoch=event.epoch,
    )


def twins(rank: int, old: ev.Process, new: ev.Process) -> InvalidInput:
    """Two living processes have one number."""
    return InvalidInput(
        f"Two processes call themselves rank {rank}: pid {old.pid} and pid {new.pid}; give each "
        "rank its own number, or end the old process."
    )


def other_rewind(event: ev.MemberOpened, others: int | None) -> InvalidInput:
    """Members disagree on the line to follow."""
    return InvalidInput(
        f"Rank {event.rank} connected with rewind_to={event.rewind_to}, the others with {others}; "
        "give all ranks the same."
    )


def unknown_epoch(event: ev.MemberOpened, epoch: int) -> NotFound:
    """There is nothing to rewind to."""
    return NotFound(
        f"{rewinding(event, epoch)}: this lineage has no committed epoch {epoch}; see "
        "`groupio ls`.",
        epoch=epoch,
    )


def not_in_line(event: ev.MemberOpened) -> NotFound:
    """The epoch that was loaded is not one of the present line."""
    key = event.resumed_from
    assert key is not None
    return NotFound(
        f"Epoch {event.epoch} cannot go on after epoch {key.epoch}, which was loaded: {key} is not "
        "in the present lineage. Load an epoch that is (see `groupio ls`), or save a newer epoch.",
        epoch=key.epoch,
    )


def damaged_epoch(event: ev.MemberOpened, key: DecisionKey) -> IntegrityError:
    """No line begins after an epoch whose record cannot be read."""
    return IntegrityError(
        f"Epoch {event.epoch} cannot go on after epoch {key.epoch}: its record epochs/{key} is "
        "damaged. Go on after another epoch; see `groupio verify`.",
        path=f"epochs/{key}",
    )


# -- a group is given up ---------------------------------------------------------


def disagreement(name: str, a: ev.MemberOpened, b: ev.MemberOpened) -> InvalidInput:
    """Two members of one group call it with different arguments."""
    return InvalidInput(
        f"Members disagree on {name} of epoch {a.epoch}: rank {a.rank} says "
        f"{getattr(a, name)!r}, rank {b.rank} says {getattr(b, name)!r}; give all ranks the same."
    )


def overdue(epoch: int, limit_s: float, what: str, missing: tuple[int, ...]) -> GroupTimeout:
    """The deadline passed; ``what`` says what the group waited for."""
    advice = "Look at the named ranks, or give" if missing else "Give"
    return GroupTimeout(
        f"Epoch {epoch} was not staged within {limit_s:g} s: {what}. {advice} a longer deadline_s.",
        missing=missing,
        epoch=epoch,
    )


def missed(rank: int, error: GroupIOError) -> GroupIOError:
    """A member came after its group was given up; ``error`` is what the others were told."""
    if not isinstance(error, GroupTimeout):
        return error
    return LateMember(f"Rank {rank} came too late. {error.message}", member=rank, epoch=error.epoch)


def gave_up(epoch: int, rank: int, why: str) -> GroupAborted:
    """A member said that it cannot go on."""
    return GroupAborted(
        f"Rank {rank} gave up the save of epoch {epoch}: {why}", members=(rank,), epoch=epoch
    )


def gone(epoch: int, rank: int, how: str) -> GroupAborted:
    """A member ended before its bytes were safe."""
    return GroupAborted(
        f"Rank {rank} {how} before epoch {epoch} was staged; epoch {epoch} is not saved, earlier "
        "epochs are intact. Restart the rank and save again.",
        members=(rank,),
        epoch=epoch,
    )


def absent(epoch: int, ways: Mapping[int, str]) -> GroupAborted:
    """Members went away before they came to the group; ``ways`` says how, by rank."""
    found = [
        f"rank(s) {ranks(tuple(rank for rank, how in ways.items() if how == one))} {one}"
        for one in dict.fromkeys(ways.values())
    ]
    return GroupAborted(
        f"Epoch {epoch} is not saved, earlier epochs are intact: {'; '.join(found)}. Restart the "
        "named rank(s), or save again on all.",
        members=tuple(ways),
        epoch=epoch,
    )


def node_lost(epoch: int, node: str, lost: tuple[int, ...], why: str) -> GroupAborted:
    """A node is gone whose bytes are needed and are nowhere else."""
    return GroupAborted(
        f"Node {node} of rank(s) {ranks(lost)} is lost ({why}), so epoch {epoch} is not saved, "
        "earlier epochs are intact. Replace the node, restart its ranks and save again.",
        members=lost,
        epoch=epoch,
    )


def not_its_ranks(epoch: int, node: str, foreign: tuple[int, ...]) -> GroupAborted:
    """A node spoke for members that are not on it."""
    return GroupAborted(
        f"Node {node} sent a report of rank(s) {ranks(foreign)}, which are not on it, so epoch "
        f"{epoch} is not saved, earlier epochs are intact. Restart the agent of node {node} and "
        "save again.",
        epoch=epoch,
    )


def bytes_lost(epoch: int, missing: Missing, notes: Sequence[str]) -> GroupAborted:
    """Chunks of a sealed group were in the memory of lost nodes only."""
    also = f" ({'; '.join(notes)})" if notes else ""
    return GroupAborted(
        f"{missing.chunks} chunks of {missing.bytes} bytes of epoch {epoch} were only in the "
        f"memory of lost node(s) {', '.join(missing.nodes)}{also}, so the epoch is not saved; save "
        "it again, with replicas=2 or more to outlive the loss of a node.",
        epoch=epoch,
    )


def rounds_over(epoch: int, rounds: int, notes: Sequence[str]) -> GroupAborted:
    """Nodes were lost, or did not get what they were to fetch, again and again."""
    also = f" ({'; '.join(notes)})" if notes else ""
    return GroupAborted(
        f"Epoch {epoch} was planned {rounds} times and still not stored{also}, so it is given up; "
        "look at the network between the nodes, then save it again.",
        epoch=epoch,
    )


def few_domains(replicas: int, domains: int) -> str:
    """Why copies cannot be made: there are too few failure domains."""
    return f"replicas={replicas} needs as many failure domains, and there are {domains}"


def thin(replicas: int, nbytes: int) -> str:
    """Why copies cannot be made: some chunks cannot be sent to other domains."""
    return f"{nbytes} bytes cannot be copied to {replicas} failure domains"


def fewer(replicas: int, lost: Sequence[str], why: str) -> str:
    """A note: there were enough copies, and now there are not."""
    return f"fewer than {replicas} copies since node(s) {', '.join(lost)} are lost: {why}"


def cramped(replicas: int, nodes: Sequence[str]) -> str:
    """Why copies cannot be made: there is too little memory for them."""
    return (
        f"replicas={replicas} needs memory for all bytes of the members and for the copies, which "
        f"node(s) {', '.join(nodes)} do not have; raise memory_bytes (GROUPIO_MEMORY_BYTES)"
    )


def not_replicated(epoch: int, why: str) -> LevelUnreachable:
    """The save goes on, but will never be REPLICATED."""
    return LevelUnreachable(
        f"Epoch {epoch} cannot reach the level replicated: {why}. The save goes on without it.",
        level=str(Level.REPLICATED),
        outcome=Outcome.UNKNOWN,
    )


def unheard(epoch: int) -> ControllerLost:
    """What became of a save was told while the node was cut off from the controller."""
    return ControllerLost(
        f"The save of epoch {epoch} was given up while this node was cut off from the job's "
        "controller; save it again.",
        outcome=Outcome.NOT_COMMITTED,
    )


def not_resumed(epoch: int, why: str) -> ControllerLost:
    """A new controller cannot finish what an earlier one had begun."""
    return ControllerLost(
        f"The job's controller was lost before epoch {epoch} was safe, and {why}; save the epoch "
        "again.",
        outcome=Outcome.NOT_COMMITTED,
    )


def new_incarnation(epoch: int, rank: int, why: str) -> GroupAborted:
    """The job was restarted under an unstaged group."""
    return GroupAborted(
        f"A new incarnation of the job began ({why}) before epoch {epoch} was staged; restart "
        "from the latest epoch.",
        members=(rank,),
        epoch=epoch,
    )


def stopped(epoch: int) -> AgentLost:
    """The agent was told to end at once."""
    return AgentLost(
        f"The agent was stopped before epoch {epoch} was staged; save it again, a new agent is "
        "started for it.",
        outcome=Outcome.NOT_COMMITTED,
    )


def no_room(order: fx.AdmitGroup, need: int, budget: int, free: int, *, ever: bool) -> StagingFull:
    """The node cannot hold the group's bytes: not now, or not ever."""
    epoch = order.key.epoch
    holds = f"has {free} bytes free now" if ever else f"has {budget} bytes in all"
    if ever and need <= free:
        holds += ", for which other groups wait"
    wait = ", or save with when_full='wait'" if ever else ""
    return StagingFull(
        f"Epoch {epoch} needs {need} bytes of staging memory on node {order.node}, which {holds}; "
        f"raise memory_bytes (GROUPIO_MEMORY_BYTES){wait}.",
        needed=need,
        budget=budget,
        skipped=order.when_full == "skip",
        epoch=epoch,
    )


def conflict(event: ev.MemberOpened) -> EpochConflict:
    """The epoch stands already, with other bytes."""
    epoch = event.epoch
    return EpochConflict(
        f"Epoch {epoch} is committed already, with other content; it stays as it is. Save under a "
        f"newer epoch, or {rewinding(event, '...')} below {epoch}.",
        epoch=epoch,
        outcome=Outcome.COMMITTED,
    )


def overruled(key: DecisionKey, *, committed: bool) -> EpochConflict | GroupAborted:
    """Another controller decided this attempt."""
    if committed:
        return EpochConflict(
            f"Another controller committed epoch {key.epoch} as {key}; end one of the two jobs "
            "that write to this store.",
            epoch=key.epoch,
            outcome=Outcome.COMMITTED,
        )
    return GroupAborted(
        f"Another controller aborted epoch {key.epoch} ({key}); save it again.",
        epoch=key.epoch,
    )


def store_gone(path: str) -> StorageError:
    """A path at which a store was used leads to none now."""
    return StorageError(
        f"the store that was at {path} is not there any more; restore it, or close the client and "
        "connect again to begin another one",
        path=path,
        errno=errno.ENOENT,
    )


def other_store(path: str, now: str, before: str) -> StorageError:
    """A path leads to another store (ids in hex) than the client has used so far."""
    return StorageError(
        f"{path} leads to another store now (its id begins with {now[:8]}, that of the one in use "
        f"with {before[:8]}); restore it, or close the client and connect again to use what is "
        "there",
        path=path,
        errno=errno.EREMCHG,
    )


def is_away(error: GroupIOError | None) -> bool:
    """The store cannot be reached now; nothing is said of what is in it."""
    return isinstance(error, StorageError) and error.errno in _AWAY


def may_return(error: GroupIOError | None) -> bool:
    """The store is away and nothing else is in its place, so that new saves may wait for it."""
    return is_away(error) and getattr(error, "errno", None) != errno.EREMCHG


def causes(error: Any) -> tuple[int, ...]:
    """The ranks that an error names, for the abort record."""
    return tuple(getattr(error, "members", None) or getattr(error, "missing", None) or ())
