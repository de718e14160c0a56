"""The demonstration: train, kill a rank in the middle of a save, resume, and prove equality.

:mod:`groupio.demo.run` directs it, :mod:`groupio.demo.train` is what every rank runs.
"""

from __future__ import annotations
