"""The simulator: the real protocol machines in a world where everything goes wrong.

``python -m groupio.testing.sim --seeds 100`` runs a hundred seeds; see :mod:`.runner`.
"""

from __future__ import annotations

from groupio.testing.sim.engine import Violated
from groupio.testing.sim.faults import ROWS, STEPS, Cells, Options, draw
from groupio.testing.sim.world import Result, Sim

__all__ = ["ROWS", "STEPS", "Cells", "Options", "Result", "Sim", "Violated", "draw"]
