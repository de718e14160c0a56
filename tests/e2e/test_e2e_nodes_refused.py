"""Agents that cannot take part are told so, and leave the others alone."""

from __future__ import annotations

from typing import Any

from nodes_help import outcomes, released

from groupio.errors import GroupTimeout, InvalidInput


def tried(cluster: Any, deadline_s: float) -> Any:
    """Ranks 0 and 1 save first, then the stranger comes; what it is told.

    The others miss it until their deadline, and nothing else happens to them.
    """
    cluster.up()
    good = cluster.connect(nodes=(0, 1))
    for one in good:
        one.send("save", epoch=1, items={"a": one.rank}, deadline_s=deadline_s)
    assert cluster.ruler in cluster.nodes[:2]
    (stranger,) = cluster.connect(nodes=(2,))
    stranger.send("save", epoch=1, items={"a": 2}, deadline_s=deadline_s)
    released([*good, stranger])
    *found, error = outcomes([*good, stranger], 1)
    for one in found:
        assert isinstance(one, GroupTimeout), found
        assert one.missing == (2,)
    assert cluster.ruler in cluster.nodes[:2]
    return error


def test_another_token(make_cluster: Any) -> None:
    cluster = make_cluster(3, hurry=True)
    secret = "11" * 32
    cluster.nodes[2].environ["GROUPIO_TOKEN"] = secret
    error = tried(cluster, 8)
    assert isinstance(error, InvalidInput), error
    assert "has another token than node n2" in error.message
    assert "wrong or missing key" in cluster.ruler.log()
    for node in cluster.nodes:
        assert secret not in node.log()


def test_two_agents_of_one_name(make_cluster: Any) -> None:
    cluster = make_cluster(3, hurry=True)
    cluster.nodes[2].environ["GROUPIO_NODE"] = "n1"
    error = tried(cluster, 8)
    assert isinstance(error, InvalidInput), error
    assert "Two agents call themselves node n1" in error.message
    assert "GROUPIO_NODE" in error.message


def test_another_store(make_cluster: Any) -> None:
    """It is another job, then, that misses all the others."""
    cluster = make_cluster(3, hurry=True)
    cluster.nodes[2].store = cluster.folder / "other"
    error = tried(cluster, 4)
    assert isinstance(error, GroupTimeout), error
    assert error.missing == (0, 1)
