"""Finds the rank and the world size of this process, from arguments or from the launcher."""

from __future__ import annotations

from collections.abc import Mapping

from groupio.errors import InvalidInput
from groupio.model import WORLD_SIZE_MAX

_LAUNCHERS = (
    ("RANK", "WORLD_SIZE"),
    ("SLURM_PROCID", "SLURM_NTASKS"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
)
"""Variables of rank and world size: torchrun, Slurm, Open MPI; the first that is there counts."""


def find_place(
    rank: int | None, world_size: int | None, environ: Mapping[str, str]
) -> tuple[int, int]:
    """Rank and world size: as given, else from the launcher's environment, else 0 of 1.

    InvalidInput when only one of the two is known, or when they are out of range.
    """
    where = "the arguments"
    if rank is None or world_size is None:
        found = _from_launcher(environ)
        if found is not None:
            names, found_rank, found_size = found
            where = (
                " and ".join(names)
                if rank is None and world_size is None
                else (f"the arguments and {' and '.join(names)}")
            )
            rank = found_rank if rank is None else rank
            world_size = found_size if world_size is None else world_size
    if rank is None and world_size is None:
        return 0, 1
    if rank is None or world_size is None:
        known, missing = ("world_size", "rank") if rank is None else ("rank", "world_size")
        raise InvalidInput(f"{known} is given without {missing}; give both or neither")
    for name, value in (("rank", rank), ("world_size", world_size)):
        if isinstance(value, bool) or not isinstance(value, int):
            raise InvalidInput(f"{name}={value!r} is of type {type(value).__name__}, not int")
    if not 1 <= world_size <= WORLD_SIZE_MAX:
        raise InvalidInput(
            f"world_size={world_size} (from {where}) is not between 1 and {WORLD_SIZE_MAX}"
        )
    if not 0 <= rank < world_size:
        raise InvalidInput(
            f"rank={rank} (from {where}) is not between 0 and {world_size - 1}, the last rank of "
            f"a world of {world_size}"
        )
    return rank, world_size


def _from_launcher(environ: Mapping[str, str]) -> tuple[tuple[str, str], int, int] | None:
    for names in _LAUNCHERS:
        texts = [environ.get(name) for name in names]
        if texts == [None, None]:
            continue
        for name, text, other in zip(names, texts, reversed(names), strict=True):
            if text is None:
                raise InvalidInput(
                    f"{other} is set and {name} is not; set both, or give rank and world_size"
                )
        numbers = []
        for name, text in zip(names, texts, strict=True):
            try:
                numbers.append(int(text or ""))
            except ValueError:
                raise InvalidInput(f"{name}={text!r} is not a number") from None
        return names, numbers[0], numbers[1]
    return None


def launch_id(environ: Mapping[str, str]) -> str | None:
    """An id of this launch of the job that all of its ranks see alike; None where there is none.

    Only of the launcher that gives rank and world size: variables of another one may be inherited
    by some of the ranks. What is counted per node or per process (TORCHELASTIC_RESTART_COUNT, the
    ids of a heterogeneous Slurm job) differs between members of one launch and does not belong
    here. A restart may keep the id: the controller then sees that processes were replaced.
    """
    for names, find_id in _LAUNCH_IDS.items():
        if all(name in environ for name in names):
            found = find_id(environ)
            # A variable may hold bytes that are no text; messages hold text.
            return found and found.encode("utf-8", "backslashreplace").decode()
    return None


def _of_torchrun(environ: Mapping[str, str]) -> str | None:
    run = environ.get("TORCHELASTIC_RUN_ID")
    # Static rendezvous calls every run "none"; the port tells launches on one host apart, and a
    # dynamic rendezvous agrees on a new one for each restart.
    return None if run is None else f"{run}:{environ.get('MASTER_PORT', '')}"


def _of_slurm(environ: Mapping[str, str]) -> str | None:
    job, step = environ.get("SLURM_JOB_ID"), environ.get("SLURM_STEP_ID")
    if job is None or step is None or any(name.startswith("SLURM_HET_") for name in environ):
        return None
    # A job that is requeued keeps its number, and counts its steps from 0 again.
    return f"slurm:{job}.{step}:{environ.get('SLURM_RESTART_COUNT', '0')}"


def _of_open_mpi(environ: Mapping[str, str]) -> str | None:
    job = environ.get("PMIX_NAMESPACE") or environ.get("OMPI_MCA_ess_base_jobid")
    return f"ompi:{job}" if job else None


_LAUNCH_IDS = dict(zip(_LAUNCHERS, (_of_torchrun, _of_slurm, _of_open_mpi), strict=True))
