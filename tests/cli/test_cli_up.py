"""``up --ray`` with a real Ray of two nodes on this machine."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cli_help import Command

import groupio as library
from groupio.agent import process
from groupio.cli import up


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Any]:
    """Two nodes, each with its own name and place for its agent."""
    if importlib.util.find_spec("ray") is None:
        pytest.skip("peer not installed: ray")
    from ray.cluster_utils import Cluster

    def node(name: str) -> dict[str, Any]:
        here = {"GROUPIO_NODE": name, "GROUPIO_RUNTIME_DIR": str(tmp_path / name)}
        store = 80 << 20
        return {"num_cpus": 1, "object_store_memory": store, "env_vars": here}

    made = Cluster(initialize_head=True, head_node_args={**node("a"), "include_dashboard": False})
    try:
        made.add_node(**node("b"))
        yield made
    finally:
        made.shutdown()


@pytest.mark.filterwarnings("default")
def test_one_agent_on_each_node_of_a_ray(groupio: Command, cluster: Any, tmp_path: Path) -> None:
    ask = ("up", "--ray", "--address", cluster.address)
    first = groupio(*ask, "--memory", "64MiB", "--json")
    assert first.code == 0, first
    rows = first.json["nodes"]
    assert [(row["node"], row["state"]) for row in rows] == [("a", "started"), ("b", "started")]
    for row in rows:
        assert Path(f"/proc/{row['pid']}").is_dir()
        assert Path(row["log"]).parent == tmp_path / row["node"]
        assert "memory budget 67108864" in Path(row["log"]).read_text()

    down = groupio(*ask, "--down", "--json")
    assert down.code == 0
    assert [row["state"] for row in down.json["nodes"]] == ["ended", "ended"]
    for name in ("a", "b"):
        where = process.runtime_paths(str(tmp_path / name), library.__version__)
        assert not process.is_alive(where)


def test_it_has_to_be_said_whose_nodes(groupio: Command) -> None:
    done = groupio("up")
    assert (done.code, done.out) == (2, "")
    assert "groupio up --ray" in done.err


def test_a_mistake_shows_before_any_node_is_asked(groupio: Command) -> None:
    done = groupio("up", "--ray", "--memory", "lots")
    assert done.code == 2
    assert "--memory 'lots' cannot be read" in done.err


def test_without_ray_it_says_what_to_install(
    groupio: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    def absent(name: str) -> Any:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr(up, "import_module", absent)
    done = groupio("up", "--ray")
    assert done.code == 2
    assert "pip install 'groupio[ray]'" in done.err


def test_the_steps_on_a_node(groupio: Command, tmp_path: Path) -> None:
    flags = {"runtime_dir": str(tmp_path / "runtime"), "memory": "64MiB"}
    first, second = up.start_here(flags), up.start_here(flags)
    assert (first["state"], second["state"]) == ("started", "runs")
    assert first["pid"] == second["pid"]
    ended = up.drain_here(flags)
    assert (ended["state"], ended["pid"]) == ("ended", first["pid"])
    assert groupio("status").code == 1
