"""Where a controller is found, from what the user and the launcher say."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from groupio.backend.posix import PosixBackend
from groupio.controller.by_etcd import EtcdCoordinator
from groupio.controller.by_store import StoreCoordinator
from groupio.controller.discover import (
    SLURM_PORT_FIRST,
    SLURM_PORTS,
    TORCHRUN_PORT_OFFSET,
    Kind,
    Where,
    find_controller,
    first_node,
)
from groupio.controller.opening import open_coordinator
from groupio.errors import InvalidInput

TORCHRUN = {
    "WORLD_SIZE": "16",
    "LOCAL_WORLD_SIZE": "8",
    "RANK": "9",
    "GROUP_RANK": "1",
    "MASTER_ADDR": "head.cluster",
    "MASTER_PORT": "29500",
}
SLURM = {
    "SLURM_JOB_ID": "123456",
    "SLURM_JOB_NODELIST": "n[07-09,12]",
    "SLURM_STEP_NODELIST": "n[08-09]",
    "SLURM_NTASKS": "4",
    "SLURMD_NODENAME": "n09",
    "SLURM_NODEID": "1",
}
OPEN_MPI = {"OMPI_COMM_WORLD_SIZE": "8", "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}


@pytest.mark.parametrize(
    ("text", "kind", "endpoints"),
    [
        ("local", Kind.LOCAL, ()),
        ("store", Kind.STORE, ()),
        ("tcp://h-1.example:7000", Kind.TCP, ("h-1.example:7000",)),
        ("tcp://10.0.0.1:1", Kind.TCP, ("10.0.0.1:1",)),
        ("tcp://[fe80::1%eth0]:65535", Kind.TCP, ("[fe80::1%eth0]:65535",)),
        ("etcd://a:2379", Kind.ETCD, ("a:2379",)),
        ("etcd://a:2379,[::1]:2380,c_1:1", Kind.ETCD, ("a:2379", "[::1]:2380", "c_1:1")),
    ],
)
def test_what_is_said_counts_first(text: str, kind: Kind, endpoints: tuple[str, ...]) -> None:
    everything = TORCHRUN | SLURM | OPEN_MPI
    here = True if kind is Kind.LOCAL else None
    address = text if endpoints else ""
    by_argument = find_controller(text, everything | {"GROUPIO_CONTROLLER": "etcd://other:1"})
    assert by_argument == Where(kind, address, "the argument or setting `controller`", here)
    by_variable = find_controller(None, everything | {"GROUPIO_CONTROLLER": f" {text} "})
    assert by_variable == Where(kind, address, "GROUPIO_CONTROLLER", here)
    assert by_variable.endpoints == endpoints


@pytest.mark.parametrize(
    "text",
    [
        "",
        "somewhere",
        "tcp://",
        "tcp://h",
        "tcp://h:0",
        "tcp://h:65536",
        "tcp://h:07",
        "tcp://h:1,i:2",
        "tcp://h:1/x",
        "tcp://u@h:1",
        "tcp://h :1",
        "tcp://-h:1",
        "tcp://[::1:1",
        "udp://h:1",
        "etcd://a:1,",
        "etcd://",
        "etcd://a:1\n",
        "h:1",
    ],
)
def test_what_cannot_be_read_is_named(text: str) -> None:
    with pytest.raises(
        InvalidInput, match=r"the argument or setting `controller` is .*'etcd://host:port"
    ):
        find_controller(text, {})


def test_an_unreadable_variable_is_named() -> None:
    with pytest.raises(InvalidInput, match="GROUPIO_CONTROLLER is 'here'"):
        find_controller(None, {"GROUPIO_CONTROLLER": "here"})


def test_an_empty_variable_says_nothing() -> None:
    assert find_controller(None, {"GROUPIO_CONTROLLER": " "}).kind is Kind.LOCAL


def test_torchrun_over_nodes_names_its_master() -> None:
    port = 29500 + TORCHRUN_PORT_OFFSET
    found = find_controller(None, TORCHRUN | SLURM | OPEN_MPI)
    assert found.kind is Kind.TCP
    assert found.address == f"tcp://head.cluster:{port}"
    assert "MASTER_ADDR" in found.why
    assert found.is_here is False
    assert find_controller(None, TORCHRUN | {"GROUP_RANK": "0"}).is_here is True
    no_group = {name: value for name, value in TORCHRUN.items() if name != "GROUP_RANK"}
    assert find_controller(None, no_group).is_here is False
    assert find_controller(None, no_group | {"RANK": "7"}).is_here is True
    inet6 = find_controller(None, TORCHRUN | {"MASTER_ADDR": "fd00::2"})
    assert inet6.address == f"tcp://[fd00::2]:{port}"


def test_every_port_of_torchrun_has_one() -> None:
    ports = set()
    for master in range(1, 65536):
        found = find_controller(None, TORCHRUN | {"MASTER_PORT": str(master)})
        port = int(found.address.rpartition(":")[2])
        assert 1024 < port < 65536
        assert port != master
        ports.add((master, port))
    assert len(ports) == 65535


@pytest.mark.parametrize("missing", ["MASTER_ADDR", "MASTER_PORT"])
def test_torchrun_without_a_master_leaves_it_to_the_store(missing: str) -> None:
    environ = {name: value for name, value in TORCHRUN.items() if name != missing}
    found = find_controller(None, environ)
    assert found == Where(Kind.STORE, "", "WORLD_SIZE=16 is more than LOCAL_WORLD_SIZE=8")


def test_torchrun_on_one_node_needs_nobody_else() -> None:
    found = find_controller(None, TORCHRUN | SLURM | {"LOCAL_WORLD_SIZE": "16"})
    assert found.kind is Kind.LOCAL
    assert found.is_here


@pytest.mark.parametrize(
    ("name", "value"),
    [("MASTER_PORT", "many"), ("MASTER_PORT", "65536"), ("WORLD_SIZE", "-1"), ("MASTER_ADDR", "/")],
)
def test_nonsense_of_torchrun_is_named(name: str, value: str) -> None:
    with pytest.raises(InvalidInput, match=name):
        find_controller(None, TORCHRUN | {name: value})


def test_slurm_names_the_first_node_of_the_step() -> None:
    port = SLURM_PORT_FIRST + 123456 % SLURM_PORTS
    found = find_controller(None, SLURM)
    assert found.kind is Kind.TCP
    assert found.address == f"tcp://n08:{port}"
    assert "SLURM_STEP_NODELIST" in found.why
    assert found.is_here is False
    assert find_controller(None, SLURM | {"SLURMD_NODENAME": "n08"}).is_here is True
    unnamed = SLURM | {"SLURMD_NODENAME": "", "SLURM_STEP_NODELIST": ""}
    found = find_controller(None, unnamed)
    assert found.address == f"tcp://n07:{port}"
    assert found.is_here is False
    assert find_controller(None, unnamed | {"SLURM_NODEID": "0"}).is_here is True


@pytest.mark.parametrize(
    "changes",
    [
        {"SLURM_STEP_NODELIST": "n08"},
        {"SLURM_STEP_NODELIST": "n-1[08]"},
        {"SLURM_NTASKS": "1"},
        {"SLURM_JOB_ID": ""},
        {"SLURM_STEP_NODELIST": "", "SLURM_JOB_NODELIST": ""},
    ],
)
def test_slurm_on_one_node_needs_nobody_else(changes: dict[str, str]) -> None:
    assert find_controller(None, SLURM | changes).kind is Kind.LOCAL


def test_a_node_list_that_cannot_be_read_is_named() -> None:
    with pytest.raises(InvalidInput, match="SLURM_STEP_NODELIST"):
        find_controller(None, SLURM | {"SLURM_STEP_NODELIST": "n[,b"})


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("a", "a"),
        ("a,b", "a"),
        ("a1,b[2-3]", "a1"),
        ("n[07-12,15],login", "n07"),
        ("n[7]", "n7"),
        ("rack[0-1]n[03,05-09]", "rack0n03"),
        ("n[001-128]-ib,x", "n001-ib"),
    ],
)
def test_the_first_node_of_a_list(nodes: str, first: str) -> None:
    assert first_node(nodes) == first


def test_open_mpi_over_nodes_meets_in_the_store() -> None:
    found = find_controller(None, OPEN_MPI | SLURM)
    assert found.kind is Kind.STORE
    assert "OMPI_COMM_WORLD_SIZE=8" in found.why
    one_node = OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "8"}
    assert find_controller(None, one_node | SLURM).kind is Kind.LOCAL


def test_alone_means_local() -> None:
    found = find_controller(None, {"PATH": "/bin", "WORLD_SIZE": "4"})
    assert found == Where(Kind.LOCAL, "", "nothing says that there are several nodes", True)


def test_the_coordinator_of_a_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with PosixBackend.open(tmp_path / "store", create=True) as store:
        for text in ("store", "local", "tcp://h:1"):
            with open_coordinator(find_controller(text, {}), store, "job", by_token=False) as made:
                assert isinstance(made, StoreCoordinator)
        etcd = find_controller("etcd://h:1,i:2", {})
        with open_coordinator(etcd, store, "job", by_token=False) as made:
            assert isinstance(made, EtcdCoordinator)
        for name in ("groupio.controller.by_etcd", "groupio.controller.etcd_http"):
            monkeypatch.delitem(sys.modules, name)
        monkeypatch.setitem(sys.modules, "httpcore", None)
        with pytest.raises(InvalidInput, match=r"etcd://h:1,i:2 .*groupio\[etcd\]"):
            open_coordinator(etcd, store, "job", by_token=False)
