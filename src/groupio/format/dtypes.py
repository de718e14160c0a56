"""Names of array dtypes, as they stand in item tables and in encoded arrays.

A native number type has its plain name ("float32", "bool", "bfloat16", "float8_e4m3fn"); any
other simple dtype has numpy's ``dtype.str`` (">f4", "<U7", "<M8[ns]", "|V3"). Names that come
from a store are matched against a fixed pattern before numpy parses them.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

import numpy as np

from groupio.errors import FormatError, InvalidInput
from groupio.format.limits import DTYPE_NAME_MAX

ML_DTYPES = frozenset(
    {
        "bcomplex32",
        "bfloat16",
        "complex32",
        "float4_e2m1fn",
        "float6_e2m3fn",
        "float6_e3m2fn",
        "float8_e3m4",
        "float8_e4m3",
        "float8_e4m3b11fnuz",
        "float8_e4m3fn",
        "float8_e4m3fnuz",
        "float8_e5m2",
        "float8_e5m2fnuz",
        "float8_e8m0fnu",
        "int1",
        "int2",
        "int4",
        "uint1",
        "uint2",
        "uint4",
    }
)
"""Number types that ml_dtypes adds to numpy (older releases of it lack some)."""

NUMPY_NAMES = frozenset(
    {
        "bool",
        "int8",
        "int16",
        "int32",
        "int64",
        "longlong",
        "uint8",
        "uint16",
        "uint32",
        "uint64",
        "ulonglong",
        "float16",
        "float32",
        "float64",
        "longdouble",
        "complex64",
        "complex128",
        "clongdouble",
    }
)
"""Native numpy number types by name; the C names are those that no width names exactly."""

_STR_FORM = re.compile(r"[<>|](?:[biufcSUV][0-9]{1,10}|[mM]8(?:\[[0-9]{0,9}[A-Za-z]{1,2}\])?)")

_C_NAMES = {"q": "longlong", "Q": "ulonglong", "g": "longdouble", "G": "clongdouble"}


def dtype_from_name(name: str) -> np.dtype[Any]:
    """The dtype that ``name`` stands for; FormatError when there is none (here)."""
    found = find_dtype(name)
    if found is None:
        raise FormatError(
            f"dtype {name[:DTYPE_NAME_MAX]!r} is not known here; a newer numpy or ml_dtypes may "
            "know it"
        )
    return found


@lru_cache(maxsize=512)
def find_dtype(name: str) -> np.dtype[Any] | None:
    """The dtype that ``name`` stands for, or None. Never an object or a structured dtype."""
    if len(name) > DTYPE_NAME_MAX:
        return None
    if name in NUMPY_NAMES:
        return np.dtype(name)
    if name in ML_DTYPES:
        # Imported here: most item tables name no such type, and the import costs 20 ms.
        import ml_dtypes

        added = getattr(ml_dtypes, name, None)
        return None if added is None else np.dtype(added)
    if _STR_FORM.fullmatch(name) is None:
        return None
    try:
        return np.dtype(name)
    except (TypeError, ValueError):
        return None


def dtype_name(dtype: np.dtype[Any]) -> str:
    """The name of a simple ``dtype``, such that :func:`dtype_from_name` gives an equal one.

    InvalidInput for a dtype that no name describes in full: object and variable-length string
    dtypes, structured dtypes, byte-swapped ml_dtypes.
    """
    if dtype.isnative and dtype.kind in "biufc":
        name = _C_NAMES.get(dtype.char, dtype.name)
    else:
        name = dtype.name if dtype.name in ML_DTYPES else dtype.str
    if dtype.hasobject or find_dtype(name) != dtype:
        raise InvalidInput(
            f"dtype {str(dtype)[:80]} has no portable name; convert the array to a native number, "
            "bytes or fixed-width string dtype"
        )
    return name
