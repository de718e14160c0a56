"""Plain values as JSON that any program can read, with their types.

What JSON has stays as it is. The rest becomes an object with one key that starts with "$":
``{"$tuple": [...]}``, ``{"$bytes": base64}``, ``{"$float": "nan"}``, ``{"$complex": [re, im]}``,
``{"$dict": [[key, value], ...]}`` for a dict that JSON cannot hold, and ``{"$array": {"dtype",
"shape", "base64"}}`` for numpy arrays and scalars (C order, little-endian). Other containers are
``{"$container": {"kind": "Counter", "content": ...}}``: the content as
:mod:`groupio.format.containers` takes it out.
"""

from __future__ import annotations

import base64
import math
from typing import Any

import numpy as np

from groupio.format.containers import kind_of


def to_json(value: Any) -> Any:
    """``value`` (a plain value of groupio) as JSON values."""
    if isinstance(value, np.ndarray | np.generic):
        return {"$array": _array(np.asarray(value))}
    kind = kind_of(value)
    if kind is not None:
        return {"$container": {"kind": kind.name, "content": to_json(kind.take(value))}}
    if isinstance(value, float) and not math.isfinite(value):
        return {"$float": repr(value)}
    if isinstance(value, complex):
        return {"$complex": [to_json(value.real), to_json(value.imag)]}
    if isinstance(value, bytes):
        return {"$bytes": base64.b64encode(value).decode()}
    if isinstance(value, tuple):
        return {"$tuple": [to_json(one) for one in value]}
    if isinstance(value, list):
        return [to_json(one) for one in value]
    if isinstance(value, dict):
        if all(isinstance(key, str) and not key.startswith("$") for key in value):
            return {key: to_json(one) for key, one in value.items()}
        return {"$dict": [[to_json(key), to_json(one)] for key, one in value.items()]}
    return value


def _array(array: np.ndarray[Any, Any]) -> dict[str, Any]:
    little = array.astype(array.dtype.newbyteorder("<"), order="C")
    return {
        "dtype": str(array.dtype),
        "shape": list(array.shape),
        "base64": base64.b64encode(little.tobytes()).decode(),
    }
