"""A colleague in the group of a store's owner reads the store; as another user, who may not write.

``reading_user.py STORE UID GID``: writes a JSON object with what was read. The first turn is as
root, on a store of its own: other users may not read what is imported on the way.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

import groupio
from groupio.cli import main


def run(*command: str) -> Any:
    """What ``groupio COMMAND --json`` says."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        code = main.run([*command, "--json"])
    return {"code": code, **json.loads(out.getvalue())}


def read(store: str) -> dict[str, Any]:
    """What this user can do with the store."""
    runtime_dir = os.environ["GROUPIO_RUNTIME_DIR"]
    settings = groupio.Settings(connect_timeout_s=5.0, runtime_dir=runtime_dir)
    with groupio.connect(store, rank=0, world_size=1, settings=settings) as client:
        found = client.load()
        handle = client.save({"w": np.zeros(3)}, epoch=9)
        with contextlib.suppress(groupio.GroupIOError):
            handle.wait("durable", timeout_s=20)
        return {
            "w": found["w"].tolist(),
            "epochs": [info.epoch for info in client.epochs()],
            "save": type(handle.error).__name__,
            "ls": run("ls", store),
            "show": run("show", store, "latest"),
            "verify": run("verify", store),
            "doctor": run("doctor", store),
        }


def rehearse() -> None:
    """Import all that will be needed."""
    with tempfile.TemporaryDirectory() as folder:
        settings = groupio.Settings(runtime_dir=f"{folder}/run")
        with groupio.connect(f"{folder}/s", rank=0, world_size=1, settings=settings) as client:
            client.save({"w": np.ones(3)}, epoch=1, wait_for="durable")
        os.environ["GROUPIO_RUNTIME_DIR"] = f"{folder}/run"
        read(f"{folder}/s")
        main.run(["agent", "stop"])


if __name__ == "__main__":
    with contextlib.redirect_stdout(io.StringIO()):
        rehearse()
    uid, gid = int(sys.argv[2]), int(sys.argv[3])
    os.setgroups([gid])
    os.setresgid(gid, gid, gid)
    os.setresuid(uid, uid, uid)
    os.environ["GROUPIO_RUNTIME_DIR"] = str(Path(sys.argv[1]).parent / "run-of-the-reader")
    json.dump(read(sys.argv[1]), sys.stdout)
