"""An FSDP2 loop: sharded model and optimizer, saved in the background, loaded by any world size.

::

    torchrun --nproc-per-node 4 examples/fsdp2.py /tmp/fsdp-store --steps 4
    torchrun --nproc-per-node 2 examples/fsdp2.py /tmp/fsdp-store --steps 8   # goes on with 2

The lines that groupio adds to the loop end with ``# +``.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from common import batch, digest, tiny_model
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import groupio.torch  # +


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("store")
    parser.add_argument("--steps", type=int, default=4)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(0)
    model = tiny_model().eval()
    mesh = init_device_mesh("cpu", (world,))
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    weights, moments = get_state_dict(model, optimizer)
    state = {"model": weights, "optimizer": moments, "step": 0}
    try:  # +
        groupio.torch.load(state, args.store)  # +
        set_state_dict(
            model,
            optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
    except groupio.NotFound:  # +
        pass  # the first run  # +

    handle = None
    for step in range(state["step"] + 1, args.steps + 1):
        optimizer.zero_grad()
        model(batch(step, rank)).square().mean().backward()
        optimizer.step()
        weights, moments = get_state_dict(model, optimizer)
        state = {"model": weights, "optimizer": moments, "step": step}
        handle = groupio.torch.save(state, args.store, step=step)  # +
    if handle is not None:
        handle.wait("durable")  # +
    found = digest(model.state_dict())
    if rank == 0:
        print(f"step {state['step']} digest {found}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
