"""A plain DDP loop that saves every step in the background and resumes where it was.

::

    torchrun --nproc-per-node 2 examples/ddp.py /tmp/ddp-store --steps 6

Run it again with more steps: it goes on from the newest epoch, bit for bit. The lines that groupio
adds to the loop end with ``# +``.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from common import batch, digest, tiny_model
from torch.nn.parallel import DistributedDataParallel

import groupio.torch  # +


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("store")
    parser.add_argument("--steps", type=int, default=6)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()

    torch.manual_seed(0)
    model = DistributedDataParallel(tiny_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    model(batch(0, rank)).sum().backward()  # one step gives the optimizer its state
    optimizer.step()
    torch.manual_seed(rank)

    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 0}
    state["rng"] = torch.get_rng_state()  # +
    try:  # +
        groupio.torch.load(state, args.store)  # +
        optimizer.load_state_dict(state["optimizer"])
        torch.set_rng_state(state["rng"])  # +
    except groupio.NotFound:  # +
        pass  # the first run  # +

    for step in range(state["step"] + 1, args.steps + 1):
        optimizer.zero_grad()
        loss = model(batch(step, rank)).square().mean()
        loss.backward()
        optimizer.step()
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
        state["rng"] = torch.get_rng_state()  # +
        handle = groupio.torch.save(state, args.store, step=step)  # +
    if state["step"] == args.steps and "handle" in locals():
        handle.wait("durable")  # +
    if rank == 0:
        print(f"step {state['step']} digest {digest(model.module.state_dict())}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
