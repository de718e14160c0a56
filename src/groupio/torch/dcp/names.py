"""Names of groupio for a ``checkpoint_id`` and an FQN of DCP."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from typing import Any

from groupio.client.arguments import check_epoch
from groupio.errors import InvalidInput
from groupio.format.structure import Leaf, Step, name_leaves

_TRAILING = re.compile(r"(?:^|\D)(\d+)/*$")

EPOCH_DIGITS_MAX = 19
"""Epochs have no more digits."""


def epoch_of(checkpoint_id: str | os.PathLike[str]) -> int:
    """The epoch that ``checkpoint_id`` names: the integer at its end ("1000", "run/step-1000").

    InvalidInput when it ends with no integer.
    """
    text = os.fspath(checkpoint_id) if isinstance(checkpoint_id, str | os.PathLike) else None
    found = None if text is None else _TRAILING.search(text)
    if found is None:
        raise InvalidInput(
            f"checkpoint_id={checkpoint_id!r} names no epoch: end it with the training step as an "
            'integer, such as "1000" or "run/step-1000"'
        )
    digits = found[1].lstrip("0") or "0"
    if len(digits) > EPOCH_DIGITS_MAX:
        raise InvalidInput(
            f"checkpoint_id={checkpoint_id!r} ends with an integer of {len(digits)} digits; epochs "
            "are below 2^63: end it with the training step"
        )
    return check_epoch(int(digits), "checkpoint_id")


def check_names(fqns: Iterable[str]) -> None:
    """InvalidInput for an FQN that cannot be the name of an item."""
    leaves = [Leaf((Step(fqn, False),)) for fqn in dict.fromkeys(fqns)]
    name_leaves(leaves)
    for leaf in leaves:
        fqn: Any = leaf.path[0].key
        if leaf.name != fqn:
            raise InvalidInput(
                f"the name {fqn[:80]!r} in the state dict cannot be stored through "
                'torch.distributed.checkpoint: names are not empty, do not start with "groupio:" '
                "and have no NUL and at most 4096 bytes; rename the key, or use groupio.torch.save"
            )
