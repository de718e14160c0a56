"""What a parser is to the fuzzer."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from groupio.errors import GroupIOError

Parse = Callable[[bytes], object]
Make = Callable[[random.Random], bytes]


@dataclass
class Target:
    """A parser: where inputs come from, who takes them, and the errors that it may raise.

    ``share`` is how many inputs it gets for one of another, where each costs much more.
    """

    make: Make
    parse: Parse
    errors: tuple[type[BaseException], ...] = (GroupIOError,)
    share: float = 1.0
