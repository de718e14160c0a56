"""Finds the functions of the package that make values of bytes or text."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import groupio

PARSING = frozenset(
    [
        "Decoder",
        "b64decode",
        "convert",
        "decode",
        "from_bytes",
        "frombuffer",
        "fromhex",
        "fromstring",
        "iter_unpack",
        "literal_eval",
        "load",
        "loads",
        "parse_monitor_message",
        "unpack",
        "unpack_from",
        "unpackbits",
    ]
)
"""The names of calls that do it."""

OUTSIDE = ("bench", "demo", "testing")
"""Packages that run on nothing but what they made themselves."""


def parsing_functions() -> set[str]:
    """``module:function`` of each, by qualified name."""
    root = Path(groupio.__file__).parent
    found = set()
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        if parts[0] not in OUTSIDE:
            tree = ast.parse(path.read_text(encoding="utf-8"))
            found |= {f"{'.'.join(parts)}:{name}" for name in _of(tree, ())}
    return found


def _of(node: ast.AST, around: tuple[str, ...]) -> Iterator[str]:
    for child in ast.iter_child_nodes(node):
        inside = around
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            inside = (*around, child.name)
        if isinstance(child, ast.Call) and _name(child.func) in PARSING:
            yield ".".join(inside)
        yield from _of(child, inside)


def _name(called: ast.expr) -> str:
    match called:
        case ast.Attribute(attr=name) | ast.Name(id=name):
            return name
    return ""
