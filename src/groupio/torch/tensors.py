"""What a rank holds of a tensor: its local part, where it lies in the global tensor, its bytes.

Everything that cannot be stored bit for bit is refused here, with its path and what to do.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from groupio.errors import InvalidInput
from groupio.format.structure import Path, path_text
from groupio.torch.flatten import type_text

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

_CONTAINERS = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32, 8: torch.uint64}
_COPY_AS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True)
class Local:
    """The part of a tensor that this rank holds.

    ``tensor`` shares memory with the caller's tensor, without autograd, in the dtype in which it
    is stored. ``note`` is the torch dtype if it is stored as another one, else "". ``replicated``
    says that other ranks were declared to hold equal bytes.
    """

    tensor: torch.Tensor
    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]
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
    def sharded(self) -> bool:
        """Whether this is less than the whole tensor."""
        return self.shape != self.global_shape


def dtype_text(dtype: torch.dtype) -> str:
    """The bare name of a torch dtype: "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def local_part(tensor: torch.Tensor, path: Path) -> Local:
    """What this rank holds of ``tensor``, which stands at ``path`` of the state dict.

    Raises InvalidInput, naming the path, for tensors without plain memory (sparse, meta,
    quantised, nested, fake), unknown subclasses, ``Partial`` and strided DTensor placements.
    """
    if not isinstance(tensor, DTensor):
        stored, note = _stored(_plain(tensor, path))
        shape = tuple(stored.shape)
        return Local(stored, shape, (0,) * len(shape), note=note)
    _check_placements(tensor, path)
    mesh, placements = tensor.device_mesh, tensor.placements
    global_shape = tuple(tensor.shape)
    with torch.no_grad():
        local = _plain(tensor.to_local(), path)
    if mesh.get_coordinate() is None:
        # Not a member of the mesh: it holds an empty part, whatever shape torch gives it.
        local = local.new_empty((0, *global_shape[1:]))
        shape, offsets = tuple(local.shape), (0,) * local.ndim
    else:
        shape, offsets = compute_local_shape_and_global_offset(global_shape, mesh, placements)
    if tuple(local.shape) != tuple(shape):
        raise InvalidInput(
            f"the DTensor at {path_text(path)} holds a local tensor of shape "
            f"{tuple(local.shape)}, but its placements {placements} on a mesh of "
            f"{tuple(mesh.shape)} give {tuple(shape)}; build it with an explicit shape and stride"
        )
    offsets = _clipped(offsets, shape, global_shape)
    replicated = any(
        isinstance(placement, Replicate) and mesh.size(dim) > 1
        for dim, placement in enumerate(placements)
    )
    stored, note = _stored(local)
    return Local(stored, global_shape, offsets, replicated, note)


def as_integers(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory seen in a dtype that every copy keeps bit for bit, NaNs included."""
    plain = _COPY_AS.get(tensor.element_size())
    return tensor if plain is None or tensor.dtype == plain else tensor.view(plain)


def resolved(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor``, or a copy where torch only notes that it is conjugate or negative."""
    return tensor.resolve_conj().resolve_neg()


def overlaps_itself(tensor: torch.Tensor) -> bool:
    """Whether two indexes of ``tensor`` may mean the same memory (an expanded tensor)."""
    reach = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride <= reach:
                return True
            reach += stride * (size - 1)
    return False


def _plain(tensor: torch.Tensor, path: Path) -> torch.Tensor:
    """``tensor`` without autograd; InvalidInput unless its bytes lie in plain memory."""
    if isinstance(tensor, AsyncCollectiveTensor):
        tensor = tensor.wait()
    problem = ""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
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
        elif not isinstance(placement, Replicate | Shard):
            problem = (
                f"has the placement {placement}, which this version does not store; "
                "call redistribute() with Shard or Replicate first"
            )
        else:
            continue
        raise InvalidInput(f"the DTensor at {path_text(path)} of the state dict {problem}")


def _clipped(
    offsets: tuple[int, ...], shape: tuple[int, ...], global_shape: tuple[int, ...]
) -> tuple[int, ...]:
    """Offsets of a shard; those of an empty one are moved inside the tensor."""
    return tuple(
        min(int(offset), total - size)
        for offset, size, total in zip(offsets, shape, global_shape, strict=True)
    )
