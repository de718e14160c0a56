"""What no flush plan can beat, from HiGHS. Shares no code with the planner."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.optimize import Bounds, LinearConstraint, linprog, milp
from scipy.sparse import coo_matrix, csr_matrix

from groupio.model import NodeLink
from groupio.plan.write import WriteClasses


@dataclass(frozen=True)
class Program:
    """Variables: the chunks of class k that node s reads and node w writes, then the time.

    ``links`` says how much longer than the time each link takes (rows: uplinks, egress, ingress),
    ``complete`` how many chunks of each class there are. The time is in units of ``unit_s``.
    """

    links: csr_matrix
    complete: csr_matrix
    counts: npt.NDArray[np.float64]
    chunk_bytes: npt.NDArray[np.float64]  # of each variable but the last
    moved: npt.NDArray[np.bool_]
    unit_s: float
    backend_s: float


def program(
    classes: WriteClasses,
    nodes: Sequence[NodeLink],
    backend_bytes_per_s: float | None = None,
    *,
    splittable: bool,
) -> Program:
    """The flush as a program.

    If chunks are ``splittable``, all bytes are one chunk, of which each holder set has a part:
    HiGHS wants numbers near 1.
    """
    total = max(int((classes.lengths * classes.counts).sum()), 1)
    supply: dict[tuple[tuple[int, ...], int], float] = {}
    for holders, length, count in zip(
        classes.holders, classes.lengths.tolist(), classes.counts.tolist(), strict=True
    ):
        size = total if splittable else length
        key = holders, size
        supply[key] = supply.get(key, 0) + length * count / size
    n = len(nodes)
    ports = [i for i, node in enumerate(nodes) if node.fabric_ok]
    ways = [
        (k, s, w)
        for k, (holders, _) in enumerate(supply)
        for s in holders
        for w in ([s, *(p for p in ports if p != s)] if s in ports else [s])
    ]
    k, s, w = np.array(ways, np.int64).reshape(-1, 3).T
    moved = s != w
    chunk_bytes = np.array([length for _, length in supply], np.float64)[k]
    rates = np.array(
        [node.uplink_bytes_per_s for node in nodes]
        + [node.fabric_bytes_per_s for node in nodes] * 2
    )
    unit_s = total / float(rates.max())
    variable = np.arange(len(ways))
    row = np.concatenate([w, n + s[moved], 2 * n + w[moved]])
    column = np.concatenate([variable, variable[moved], variable[moved]])
    value = chunk_bytes[column] / rates[row] / unit_s
    shape = (3 * n, len(ways) + 1)
    times = (np.full(3 * n, -1.0), (np.arange(3 * n), np.full(3 * n, len(ways))))
    links = coo_matrix((value, (row, column)), shape) + coo_matrix(times, shape)
    complete = coo_matrix((np.ones(len(ways)), (k, variable)), (len(supply), len(ways) + 1))
    return Program(
        links=links.tocsr(),
        complete=complete.tocsr(),
        counts=np.array(list(supply.values()), np.float64),
        chunk_bytes=chunk_bytes,
        moved=moved,
        unit_s=unit_s,
        backend_s=total / backend_bytes_per_s if backend_bytes_per_s else 0.0,
    )


def least_seconds(
    classes: WriteClasses, nodes: Sequence[NodeLink], backend_bytes_per_s: float | None = None
) -> float:
    """The makespan that no plan can beat, since here chunks may be split."""
    p = program(classes, nodes, backend_bytes_per_s, splittable=True)
    solved = linprog(
        np.append(np.zeros(len(p.chunk_bytes)), 1.0),
        A_ub=p.links,
        b_ub=np.zeros(p.links.shape[0]),
        A_eq=p.complete,
        b_eq=p.counts,
        method="highs",
    )
    assert solved.success, solved.message
    return max(float(solved.x[-1]) * p.unit_s, p.backend_s)


def least_moved_bytes(classes: WriteClasses, nodes: Sequence[NodeLink], seconds: float) -> float:
    """The fewest bytes over the fabric in any flush of ``seconds``; chunks may be split."""
    p = program(classes, nodes, splittable=True)
    solved = linprog(
        np.append(p.moved.astype(np.float64), 0.0),
        A_ub=p.links,
        b_ub=np.zeros(p.links.shape[0]),
        A_eq=p.complete,
        b_eq=p.counts,
        bounds=[(0, None)] * len(p.chunk_bytes) + [(0, seconds / p.unit_s * (1 + 1e-7))],
        method="highs",
    )
    assert solved.success, solved.message
    return float(solved.fun) * float(p.chunk_bytes[0])


def best_whole_seconds(
    classes: WriteClasses, nodes: Sequence[NodeLink], backend_bytes_per_s: float | None = None
) -> float:
    """The makespan that no plan of whole chunks can beat; slow, for small worlds only."""
    p = program(classes, nodes, backend_bytes_per_s, splittable=False)
    variables = len(p.chunk_bytes)
    solved = milp(
        np.append(np.zeros(variables), 1.0),
        constraints=[
            LinearConstraint(p.links, ub=np.zeros(p.links.shape[0])),
            LinearConstraint(p.complete, p.counts, p.counts),
        ],
        integrality=np.append(np.ones(variables), 0),
        bounds=Bounds(0, np.inf),
        options={"time_limit": 10},
    )
    assert solved.mip_dual_bound is not None, solved.message
    return max(float(solved.mip_dual_bound) * p.unit_s, p.backend_s)
