from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from groupio.errors import FormatError, InvalidInput
from groupio.format.dtypes import (
    ML_DTYPES,
    NUMPY_NAMES,
    dtype_from_name,
    dtype_name,
    find_dtype,
)


@pytest.mark.parametrize("name", sorted(NUMPY_NAMES | ML_DTYPES))
def test_every_number_type_has_one_name(name: str) -> None:
    dtype = find_dtype(name)
    if dtype is None:
        assert not hasattr(ml_dtypes, name)
    else:
        assert dtype_name(dtype) == name
        assert dtype_from_name(name) == dtype


@pytest.mark.parametrize("form", [">f4", "<U7", "|S3", "<M8[ns]", "<m8[25us]", "|V3", "<M8"])
def test_other_simple_types_go_by_their_form(form: str) -> None:
    assert dtype_name(np.dtype(form)) == form
    assert find_dtype(form) == np.dtype(form)


@pytest.mark.parametrize(
    "name",
    ["", "object", "O", "|O8", "f4,f4", "(2,3)f4", "<f3", "<M8[xx]", "i4", "T", "x" * 100, "float",
     "<V99999999999", "<U9999999999"],
)  # fmt: skip
def test_names_of_no_simple_type_are_unknown(name: str) -> None:
    assert find_dtype(name) is None
    with pytest.raises(FormatError, match="not known here"):
        dtype_from_name(name)


@pytest.mark.parametrize(
    "dtype",
    [
        np.dtype("O"),
        np.dtypes.StringDType(),
        np.dtype([("a", "i4")]),
        np.dtype(ml_dtypes.bfloat16).newbyteorder(">"),
    ],
)
def test_types_without_a_full_name_are_refused(dtype: np.dtype) -> None:
    with pytest.raises(InvalidInput, match="no portable name"):
        dtype_name(dtype)


def test_a_type_that_this_ml_dtypes_lacks_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    find_dtype.cache_clear()
    monkeypatch.delattr(ml_dtypes, "int4")
    assert find_dtype("int4") is None
    find_dtype.cache_clear()
