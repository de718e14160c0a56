"""The local part of a tensor on a rank: where it lies in the global tensor, and its bytes.

Everything that cannot be stored bit for bit is refused here, with its path and what to do.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor, Partial

from groupio.errors import InvalidInput
from groupio.format.structure import Path, path_text
from groupio.plan.read import Box
from groupio.torch.flatten import type_text
from groupio.torch.placing import Piece, is_placed, pieces_of, replicates, whole_piece

STORED_DTYPES = frozenset(
    {
        torch.bool,
        *(torch.uint8, torch.uint16, torch.uint32, torch.uint64),
        *(torch.int8, torch.int16, torch.int32, torch.int64),
        *(torch.float16, torch.float32, torch.float64, torch.bfloat16),
        *(torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz),
        *(torch.complex64, torch.complex128),
        # Not in torch 2.6.
        *(getattr(torch, name) for name in ("float8_e8m0fnu",) if hasattr(torch, name)),
    }
)
"""torch dtypes that item tables name; any other is stored as unsigned integers of its size, with
its own name noted in the structure record."""

PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter)
"""The types that are plain memory; of others only DTensors are known."""

_CONTAINERS = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32, 8: torch.uint64}
_COPY_AS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True)
class Local:
    """The part of a tensor that this rank holds.

    ``tensor`` shares memory with the caller's tensor, without autograd, in the dtype in which it
    is stored. ``pieces`` say which boxes of the global tensor it consists of: one, except after
    strided sharding. ``note`` is the torch dtype if it is stored as another one, else "".
    ``replicated`` says that other ranks were declared to hold equal bytes.
    """

    tensor: torch.Tensor
    global_shape: tuple[int, ...]
    pieces: tuple[Piece, ...]
    replicated: bool = False
    note: str = ""

    @property
    def shape(self) -> tuple[int, ...]:
        """The local extent."""
        return tuple(self.tensor.shape)

    @property
    def dtype(self) -> str:
        """The dtype as it stands in an item table, such as "float32"."""
        return dtype_text(self.tensor.dtype)

    @property
    def offsets(self) -> tuple[int, ...]:
        """The corner of the first box in the global tensor."""
        return self.pieces[0].box.offsets

    @property
    def sharded(self) -> bool:
        """Whether this is less than the whole tensor."""
        return self.shape != self.global_shape

    def boxes(self) -> Iterator[tuple[torch.Tensor, Box]]:
        """The pieces as tensors, each with its box."""
        if len(self.pieces) == 1:
            yield self.tensor, self.pieces[0].box
            return
        for piece in self.pieces:
            yield self.tensor[piece.local], piece.box


@cache
def dtype_text(dtype: torch.dtype) -> str:
    """The bare name of a torch dtype: "bfloat16"."""
    return str(dtype).removeprefix("torch.")


Placed = tuple[tuple[int, ...], tuple[Piece, ...], bool]
"""The shape of a DTensor's local part, its pieces, and whether it is replicated."""


def local_part(
    tensor: torch.Tensor, path: Path, placed: dict[tuple[object, ...], Placed] | None = None
) -> Local:
    """What this rank holds of ``tensor``, which stands at ``path`` of the state dict.

    ``placed`` remembers from call to call, of the same meshes, where DTensors lie: there are many
    of few shapes.

    Raises InvalidInput, naming the path, for tensors without plain memory (sparse, meta,
    quantised, nested, fake), unknown subclasses, and DTensors whose placements do not say which
    elements a rank has.
    """
    if not isinstance(tensor, DTensor):
        stored, note = plain_part(tensor, path)
        shape = tuple(stored.shape)
        return Local(stored, shape, (whole_piece(shape),), note=note)
    mesh, placements = tensor.device_mesh, tensor.placements
    global_shape = tuple(tensor.shape)
    key = (id(mesh), placements, global_shape)
    known = None if placed is None else placed.get(key)
    if known is None:
        _check_placements(tensor, path)
        known = _placed(tensor, global_shape)
        if placed is not None:
            placed[key] = known
    shape, pieces, replicated = known
    with torch.no_grad():
        local = _plain(tensor.to_local(), path)
    if mesh.get_coordinate() is None:
        # Whatever shape torch gives it.
        local = local.new_empty(shape, device=local.device)
    if tuple(local.shape) != shape:
        raise InvalidInput(
            f"the DTensor at {path_text(path)} holds a local tensor of shape "
            f"{tuple(local.shape)}, but its placements {placements} on a mesh of "
            f"{tuple(mesh.shape)} give {shape}; build it with an explicit shape and stride"
        )
    stored, note = _stored(local)
    return Local(stored, global_shape, pieces, replicated, note)


def _placed(tensor: DTensor, global_shape: tuple[int, ...]) -> Placed:
    mesh, placements = tensor.device_mesh, tuple(tensor.placements)
    coordinate, mesh_shape = mesh.get_coordinate(), tuple(mesh.shape)
    replicated = replicates(mesh_shape, placements)
    if coordinate is None:
        # Not a member of the mesh: it holds an empty part.
        shape = (0, *global_shape[1:])
        return shape, (whole_piece(shape),), replicated
    return *pieces_of(global_shape, mesh_shape, placements, tuple(coordinate)), replicated


def plain_part(tensor: torch.Tensor, path: Path) -> tuple[torch.Tensor, str]:
    """A tensor that is no DTensor as it is stored, and its ``note``; see :class:`Local`.

    Raises InvalidInput like :func:`local_part`.
    """
    return _stored(_plain(tensor, path))


def all_plain(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether :func:`plain_part` would give all of these PLAIN_TENSORS as they are, no notes.

    Several times as fast for many: one False is looked into one by one.
    """
    # Quantised tensors have dtypes of their own.
    if not {tensor.dtype for tensor in tensors} <= STORED_DTYPES:
        return False
    strided = torch.strided
    return all(
        tensor.layout is strided
        and not tensor.is_nested
        and not tensor.is_meta
        and (tensor.untyped_storage().nbytes() or not tensor.numel())
        for tensor in tensors
    )


def as_integers(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory seen in a dtype that every copy keeps bit for bit, NaNs included."""
    plain = _COPY_AS.get(tensor.element_size())
    return tensor if plain is None or tensor.dtype == plain else tensor.view(plain)


def resolved(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor``, or a copy where torch only notes that it is conjugate or negative."""
    return tensor.resolve_conj().resolve_neg()


def overlaps_itself(tensor: torch.Tensor) -> bool:
    """Whether two indexes of ``tensor`` may mean the same memory (an expanded tensor)."""
    if tensor.is_contiguous():
        return False
    reach = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride <= reach:
                return True
            reach += stride * (size - 1)
    return False


def check_no_fake_mode(what: str) -> None:
    """InvalidInput where a FakeTensorMode is active, in which no tensor has bytes."""
    if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None:
        raise InvalidInput(
            f"a FakeTensorMode is active, in which tensors have no bytes; call {what} outside of it"
        )


def _plain(tensor: torch.Tensor, path: Path) -> torch.Tensor:
    """``tensor`` without autograd; InvalidInput unless its bytes lie in plain memory."""
    if isinstance(tensor, AsyncCollectiveTensor):
        tensor = tensor.wait()
    problem = ""
    if type(tensor) not in PLAIN_TENSORS:
        problem, todo = "is of a tensor subclass", "store the plain tensors that it is made of"
    elif tensor.is_quantized:
        problem, todo = "is quantised", "store int_repr(), the scale and the zero point"
    elif tensor.is_nested:
        problem, todo = "is nested", "store its values and offsets, or unbind()"
    elif tensor.layout != torch.strided:
        problem, todo = f"has the layout {tensor.layout}", "store its dense parts, or to_dense()"
    elif tensor.is_meta:
        problem, todo = "is on the meta device and has no bytes", "give it memory first"
    elif tensor.numel() and not tensor.untyped_storage().nbytes():
        problem, todo = "has had its memory freed", "unshard or materialise it first"
    if problem:
        raise InvalidInput(
            f"the tensor at {path_text(path)} of the state dict ({type_text(tensor)}, "
            f"{dtype_text(tensor.dtype)}) {problem}, which cannot be stored; {todo}"
        )
    return tensor.detach()


def _stored(tensor: torch.Tensor) -> tuple[torch.Tensor, str]:
    if tensor.dtype in STORED_DTYPES:
        return tensor, ""
    return resolved(tensor).view(_CONTAINERS[tensor.element_size()]), dtype_text(tensor.dtype)


def _check_placements(tensor: DTensor, path: Path) -> None:
    for placement in tensor.placements:
        if isinstance(placement, Partial):
            problem = (
                "has a Partial placement: its value is a sum over ranks that was not made yet; "
                "call redistribute() with Replicate or Shard first"
            )
        elif not is_placed(placement):
            problem = (
                f"has the placement {placement}, which cannot be stored; call redistribute() with "
                "Shard or Replicate first"
            )
        else:
            continue
        raise InvalidInput(f"the DTensor at {path_text(path)} of the state dict {problem}")
