"""Finds the controller of a job: named by the caller, or by the job's launcher.

In this order; the first that says something counts:

1. the argument, then ``GROUPIO_CONTROLLER``: ``local``, ``store``, ``tcp://host:port`` or
   ``etcd://host:port[,host:port]``;
2. torchrun, when the group spans nodes (``WORLD_SIZE`` > ``LOCAL_WORLD_SIZE``):
   ``MASTER_ADDR``, at ``MASTER_PORT`` + ``TORCHRUN_PORT_OFFSET``;
3. a record in the store, when another launcher (Open MPI) says that there are several nodes;
   before Slurm, whose variables differ from node to node under ``mpirun``;
4. Slurm, when the step has several nodes: its first node, at a port made of the job's number;
5. the node's own agent.

Everything here is a pure function of its arguments.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from groupio.errors import InvalidInput

TORCHRUN_PORT_OFFSET = 7001
"""A controller listens so many ports above torchrun's own store."""

SLURM_PORT_FIRST = 17000
"""Slurm jobs use this port and those above it, one for each of ``SLURM_PORTS`` job numbers."""

SLURM_PORTS = 8000

VARIABLE = "GROUPIO_CONTROLLER"

_ARGUMENT = "the argument or setting `controller`"

_PORT_MAX = 65535
_HOST = re.compile(
    r"[A-Za-z0-9_]([A-Za-z0-9_.\-]{0,252}[A-Za-z0-9_])?"
    r"|\[[0-9A-Fa-f:.]{2,45}(%[A-Za-z0-9_.\-]{1,15})?\]"
)
_EXPECTED = "'local', 'store', 'tcp://host:port' or 'etcd://host:port[,host:port]'"

_SIZES = (
    ("WORLD_SIZE", "LOCAL_WORLD_SIZE"),
    ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"),
)
"""Variables of all ranks and of those on this node; more of the first means several nodes."""


class Kind(StrEnum):
    """How a controller is found."""

    LOCAL = "local"
    TCP = "tcp"
    ETCD = "etcd"
    STORE = "store"


@dataclass(frozen=True, slots=True)
class Where:
    """Where a job's controller is, and how that was found out.

    ``address`` is ``tcp://host:port``, or ``etcd://...`` as it was given; "" for the store and
    the node's own agent. ``why`` is for status and messages. ``is_here``: whether this node is
    the one that has to host it; None when that does not follow (it is elected, or somebody
    starts it by hand).
    """

    kind: Kind
    address: str
    why: str
    is_here: bool | None = None

    @property
    def is_said(self) -> bool:
        """Somebody said so, rather than the launcher's variables."""
        return self.why in (_ARGUMENT, VARIABLE)

    @property
    def endpoints(self) -> tuple[str, ...]:
        """``host:port`` of each server in ``address``; () when there is none."""
        _, _, hosts = self.address.partition("://")
        return tuple(hosts.split(",")) if hosts else ()


def find_controller(controller: str | None, environ: Mapping[str, str]) -> Where:
    """Where the controller is; ``controller`` is what the caller or the settings say (None: look).

    InvalidInput, naming the variable, for what cannot be read.
    """
    if controller is not None:
        return _said(controller, _ARGUMENT)
    text = environ.get(VARIABLE, "").strip()
    if text:
        return _said(text, VARIABLE)
    return (
        _by_torchrun(environ)
        or _by_sizes(environ)
        or _by_slurm(environ)
        or Where(Kind.LOCAL, "", "nothing says that there are several nodes", True)
    )


def _said(text: str, where: str) -> Where:
    if text in (Kind.LOCAL, Kind.STORE):
        kind = Kind(text)
        return Where(kind, "", where, True if kind is Kind.LOCAL else None)
    scheme, mark, hosts = text.partition("://")
    servers = hosts.split(",")
    good = all(_is_server(server) for server in servers)
    if mark and good and (scheme == Kind.ETCD or (scheme == Kind.TCP and len(servers) == 1)):
        return Where(Kind(scheme), text, where)
    raise InvalidInput(f"{where} is {text[:200]!r}, which is not {_EXPECTED}")


def _is_server(text: str) -> bool:
    host, _, port = text.rpartition(":")
    return bool(
        _HOST.fullmatch(host) and re.fullmatch(r"[1-9][0-9]{0,4}", port) and int(port) <= _PORT_MAX
    )


def _by_torchrun(environ: Mapping[str, str]) -> Where | None:
    world = _number(environ, "WORLD_SIZE", 0)
    local = _number(environ, "LOCAL_WORLD_SIZE", 0)
    host, port = environ.get("MASTER_ADDR", "").strip(), _number(environ, "MASTER_PORT", 0)
    if not (0 < local < world and host and port):
        return None
    if port > _PORT_MAX:
        raise InvalidInput(f"MASTER_PORT={port} is not between 1 and {_PORT_MAX}")
    if port + TORCHRUN_PORT_OFFSET > _PORT_MAX:
        port -= 2 * TORCHRUN_PORT_OFFSET
    address = _address("MASTER_ADDR", host, port + TORCHRUN_PORT_OFFSET)
    first = environ.get("GROUP_RANK")
    is_here = first == "0" if first is not None else _number(environ, "RANK", 0) < local
    return Where(Kind.TCP, address, "torchrun's MASTER_ADDR and MASTER_PORT", is_here)


def _by_sizes(environ: Mapping[str, str]) -> Where | None:
    for everywhere, here in _SIZES:
        world, local = _number(environ, everywhere, 0), _number(environ, here, 0)
        if 0 < local < world:
            return Where(Kind.STORE, "", f"{everywhere}={world} is more than {here}={local}")
        if local and world:
            return Where(Kind.LOCAL, "", f"{everywhere} and {here} are both {world}", True)
    return None


def _by_slurm(environ: Mapping[str, str]) -> Where | None:
    # A step may have fewer nodes than its job.
    for prefix in ("SLURM_STEP", "SLURM_JOB"):
        nodes = environ.get(f"{prefix}_NODELIST", "").strip()
        if nodes:
            break
    job = _number(environ, "SLURM_JOB_ID", _number(environ, "SLURM_JOBID", 0))
    # In a batch script without srun there may be one process on many nodes.
    single = _number(environ, "SLURM_NTASKS", 2) < 2
    if not nodes or not job or single or not _lists_several(nodes):
        return None
    first = first_node(nodes)
    address = _address(f"{prefix}_NODELIST", first, SLURM_PORT_FIRST + job % SLURM_PORTS)
    name = environ.get("SLURMD_NODENAME")
    is_here = name == first if name else _number(environ, "SLURM_NODEID", 0) == 0
    return Where(Kind.TCP, address, f"the first node of Slurm's {prefix}_NODELIST", is_here)


def _lists_several(nodes: str) -> bool:
    return "," in nodes or "-" in "".join(re.findall(r"\[[^\]]*\]", nodes))


def first_node(nodes: str) -> str:
    """The first host of a Slurm host list such as ``rack[0-1]n[07-12,15],login``."""
    outside = re.match(r"((?:[^,\[\]]|\[[^\[\]]*\])+)(?:,|\Z)", nodes)
    text = outside[1] if outside else nodes
    return re.sub(r"\[([0-9]+)[^\]]*\]", r"\1", text)


def _address(variable: str, host: str, port: int) -> str:
    if ":" in host and not host.startswith("["):
        host = f"[{host}]"
    server = f"{host}:{port}"
    if not _is_server(server):
        raise InvalidInput(f"{variable} names the host {host[:200]!r}, which is no host name")
    return f"tcp://{server}"


def _number(environ: Mapping[str, str], name: str, default: int) -> int:
    text = environ.get(name, "").strip()
    if not text:
        return default
    if not re.fullmatch(r"[0-9]{1,18}", text):
        raise InvalidInput(f"{name}={text[:80]!r} is not a number")
    return int(text)
