"""Options of a measurement: shapes, systems and sizes, checked before any process starts."""

from __future__ import annotations

import importlib.util
from typing import NamedTuple

import msgspec

from groupio.errors import InvalidInput

SHAPES = ("fsdp", "ddp", "lora", "tiny")
TINY_TENSORS = 20_000
TINY_BYTES = 64


class Entry(NamedTuple):
    """Where a system's adapter is, and which modules it needs beyond torch."""

    module: str
    adapter: str
    needs: tuple[str, ...] = ()
    reshards: bool = False
    """Whether what N ranks saved can be loaded by another number of ranks."""


SYSTEMS = {
    "groupio": Entry("with_groupio", "WithDoor", reshards=True),
    "groupio_nodoor": Entry("with_groupio", "WithoutDoor", reshards=True),
    "torch_save": Entry("with_torch_save", "TorchSave"),
    "dcp": Entry("with_dcp", "Dcp", reshards=True),
    "dcp_async": Entry("with_dcp", "DcpAsync", reshards=True),
    "orbax": Entry("with_orbax", "Orbax", ("orbax.checkpoint", "jax")),
    "nvrx_local": Entry("with_nvrx", "NvrxLocal", ("nvidia_resiliency_ext",)),
    "torchsnapshot": Entry("with_torchsnapshot", "TorchSnapshot", ("torchsnapshot",)),
}
OURS = ("groupio", "groupio_nodoor")
PEERS = tuple(name for name in SYSTEMS if name not in OURS)


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """One run of one shape, as every rank gets it. Sizes in MiB, ``folder`` is the run's own."""

    command: str
    shape: str
    systems: tuple[str, ...]
    ranks: int
    mb_per_rank: int
    epochs: int
    folder: str
    load_ranks: int = 0
    step_s: float = 1.0
    settle_s: float = 0.5
    timeout_s: float = 1800.0

    @property
    def bytes_per_rank(self) -> int:
        """What each rank passes to a save, in bytes."""
        if self.shape == "tiny":
            return TINY_TENSORS * TINY_BYTES
        return self.mb_per_rank << 20

    @property
    def bytes_unique(self) -> int:
        """What one epoch holds when equal tensors of the ranks count once, in bytes."""
        copies = self.ranks if self.shape in ("fsdp", "lora") else 1
        return copies * self.bytes_per_rank


def missing_module(system: str) -> str | None:
    """The first module that ``system`` needs and this Python does not have."""
    for name in SYSTEMS[system].needs:
        try:
            found = importlib.util.find_spec(name)
        except ModuleNotFoundError:  # of a parent package
            found = None
        if found is None:
            return name
    return None


def choose_systems(peers: str | None) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The systems to measure, ours first, and those left out because they are not installed.

    ``peers``: names with commas, "none", or None for all that are installed. InvalidInput for an
    unknown name, and for a named peer that is not installed.
    """
    if peers is None:
        missing = tuple(name for name in PEERS if missing_module(name))
        return (*OURS, *(name for name in PEERS if name not in missing)), missing
    names = [name.strip() for name in peers.split(",") if name.strip()]
    if names == ["none"]:
        return OURS, ()
    for name in names:
        if name not in PEERS:
            raise InvalidInput(f"there is no peer {name!r}; the peers are {', '.join(PEERS)}")
        module = missing_module(name)
        if module:
            raise InvalidInput(
                f"peer not installed: {name} needs {module}; pip install 'groupio[bench-peers]', "
                "or leave it out of --peers"
            )
    return (*OURS, *dict.fromkeys(names)), ()


def choose_shapes(text: str) -> tuple[str, ...]:
    """The shapes that ``text`` names, with commas or as "all"; InvalidInput for any other."""
    if text.strip() == "all":
        return SHAPES
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    for name in names:
        if name not in SHAPES:
            raise InvalidInput(f"there is no shape {name!r}; the shapes are {', '.join(SHAPES)}")
    if not names:
        raise InvalidInput(f"--shape is empty; the shapes are {', '.join(SHAPES)}")
    return names


def require_torch() -> None:
    """InvalidInput when torch is not installed."""
    if importlib.util.find_spec("torch") is None:
        raise InvalidInput("groupio bench needs torch: pip install 'groupio[torch]'")


def room_needed(options: Options) -> tuple[int, int]:
    """Bytes of disk and of memory that a run takes at most, roughly."""
    each, all_ranks = options.bytes_unique, options.ranks * options.bytes_per_rank
    ours = [name for name in options.systems if name in OURS]
    peers = len(options.systems) - len(ours)
    saves = options.epochs if options.command != "load" else 1
    disk = each * len(ours) * saves + 2 * peers * all_ranks + each
    # The tensors, their warm copy, what the arenas hold and what an asynchronous peer copies.
    memory = all_ranks * (3 + 2 * len(ours))
    if options.command == "load":
        one = options.bytes_per_rank if options.load_ranks == options.ranks else each
        memory = max(memory, 2 * options.load_ranks * one)
    return disk, memory + (1 << 28) * max(options.ranks, options.load_ranks)


def check_room(options: Options, disk_free: int, memory_free: int) -> None:
    """InvalidInput when the file system or the memory is too small for the run."""
    disk, memory = room_needed(options)
    advice = "use fewer --ranks, --epochs, --peers or a smaller --mb-per-rank"
    for what, needed, free in (("disk", disk, disk_free), ("memory", memory, memory_free)):
        if needed > free:
            raise InvalidInput(
                f"the run needs about {needed / 1e9:.1f} GB of {what} and {free / 1e9:.1f} GB are "
                f"free; {advice}"
            )
