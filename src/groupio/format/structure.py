"""The structure record: how the named leaves of a nested state dict stand in it.

Names are those that ``torch.distributed.checkpoint`` gives (its FQNs): the keys of nested mappings
and the indexes of traversed lists, joined by dots. Where such a name is no item name or stands for
two leaves (``{"a.b": x, "a": {"b": y}}``, ``{1: x, "1": y}``), every leaf concerned is named by its
path instead; the structure record keeps the paths apart and the types of the keys.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from groupio.errors import FormatError, InvalidInput

RESERVED = "groupio:"
"""Prefix of the item names that the adapter makes; a user's name of this form is escaped."""

STRUCTURE = RESERVED + "structure"
"""The item that holds the structure record of one rank."""

PATHS = RESERVED + "paths"
"""The item with which the DCP classes keep the paths of the names: a dict of name -> list of the
keys (str) and indexes (int) that lead to it. They save no structure record."""

PART = RESERVED + "part:"
"""Prefix of the items with the further boxes of a tensor of which a rank holds several."""

SAMPLE = RESERVED + "sample:"
"""Prefix of the names of boxes that all replicas hold, only there to be compared; no reader takes
them for values."""

_ESCAPED = RESERVED + "path:"
"""Prefix of the names of values whose joined keys are no item name, or not theirs alone."""

NAME_BYTES_MAX = 4096
DEPTH_MAX = 100
STRUCTURE_VERSION = 1

_OPEN = {"dict": "{", "odict": "{o", "list": "[", "tuple": "("}
_KINDS = {token: kind for kind, token in _OPEN.items()}
_LEAF = "="


class Step(NamedTuple):
    """One step of a path: a key of a mapping, or an index of a list or tuple."""

    key: Any
    indexed: bool


Path = tuple[Step, ...]


@dataclass(slots=True)
class Leaf:
    """A value of the state dict. ``note`` is what its item table cannot say, usually nothing."""

    path: Path
    value: Any = None
    name: str = ""
    note: str = ""


@dataclass(slots=True)
class Branch:
    """A mapping, list or tuple of the state dict; ``children`` by key or index, in order."""

    path: Path
    kind: str
    children: dict[Any, Branch | Leaf] = field(default_factory=dict)
    value: Any = None

    def leaves(self) -> Iterator[Leaf]:
        """All leaves below, in the order of the state dict."""
        for child in self.children.values():
            if isinstance(child, Leaf):
                yield child
            else:
                yield from child.leaves()


def part_name(name: str, number: int) -> str:
    """The item name of box ``number`` (0, 1, ...) of the tensor ``name``; the first has its own."""
    return f"{PART}{number}:{name}" if number else name


def owner_of(item_name: str) -> str:
    """The name of the value that an item belongs to, "" when it is none of the user's.

    A part belongs to its tensor; records of the adapter and samples belong to nobody.
    """
    if not item_name.startswith(RESERVED):
        return item_name
    if item_name.startswith(PART):
        number, _, name = item_name[len(PART) :].partition(":")
        return name if number.isdecimal() else ""
    return item_name if item_name.startswith(_ESCAPED) else ""


def path_text(path: Path) -> str:
    """The path as it is written in Python: ``['optim']['state'][0]``."""
    return "".join(f"[{part.key!r}]" for part in path)


def name_leaves(leaves: Sequence[Leaf]) -> None:
    """Give every leaf its item name; the rule depends on the set of paths only."""
    joined = [".".join([str(part.key) for part in leaf.path]) for leaf in leaves]
    times = Counter(joined)
    escaped: set[str] = set()
    for leaf, name in zip(leaves, joined, strict=True):
        if times[name] > 1 or not _is_item_name(name):
            name = _ESCAPED + path_text(leaf.path)
            if name in escaped:
                raise InvalidInput(
                    f"two values of the state dict have the same path {path_text(leaf.path)[:200]}"
                    "; rename one of the keys"
                )
            if (size := len(name.encode())) > NAME_BYTES_MAX:
                raise InvalidInput(
                    f"the name {name[:80]}… in the state dict is {size} bytes long; "
                    f"the limit is {NAME_BYTES_MAX}"
                )
            escaped.add(name)
        leaf.name = name


def encode_structure(root: Branch) -> list[Any]:
    """The structure record of a tree: a flat list of plain values, in pre-order."""
    tokens: list[Any] = [STRUCTURE_VERSION]
    _write(root, tokens)
    return tokens


def decode_structure(tokens: Any) -> Branch:
    """The tree of a structure record, its leaves named but without values.

    Raises FormatError when the record is not one of this version.
    """
    if not isinstance(tokens, list) or not tokens or tokens[0] != STRUCTURE_VERSION:
        version = tokens[0] if isinstance(tokens, list) and tokens else type(tokens).__name__
        raise FormatError(
            f"structure record of version {version!r} cannot be read by this release; "
            f"it reads version {STRUCTURE_VERSION}"
        )
    reader = iter(tokens)
    next(reader)
    try:
        root = _read(reader, (), 0)
    except (StopIteration, TypeError, ValueError) as broken:
        raise FormatError("the structure record is malformed") from broken
    if not isinstance(root, Branch) or next(reader, reader) is not reader:
        raise FormatError("the structure record is malformed")
    name_leaves(list(root.leaves()))
    return root


def rebuild(node: Branch | Leaf, value_of: Callable[[Leaf], Any]) -> Any:
    """The nested value of ``node``, with the leaves that ``value_of`` gives."""
    if isinstance(node, Leaf):
        return value_of(node)
    built = {key: rebuild(child, value_of) for key, child in node.children.items()}
    return make_container(node.kind, built)


def make_container(kind: str, built: dict[Any, Any]) -> Any:
    """A dict, OrderedDict, list or tuple of the values of ``built``."""
    if kind == "list":
        return list(built.values())
    if kind == "tuple":
        return tuple(built.values())
    return OrderedDict(built) if kind == "odict" else built


def _is_item_name(name: str) -> bool:
    if not name or "\0" in name or name.startswith(RESERVED):
        return False
    if name.isascii():
        return len(name) <= NAME_BYTES_MAX
    try:
        return len(name.encode("utf-8")) <= NAME_BYTES_MAX
    except UnicodeEncodeError:  # a lone surrogate, which repr() escapes
        return False


def _write(node: Branch | Leaf, tokens: list[Any]) -> None:
    if isinstance(node, Leaf):
        tokens.append(_LEAF + node.note)
        return
    tokens += (_OPEN[node.kind], len(node.children))
    keyed = node.kind in ("dict", "odict")
    for key, child in node.children.items():
        if keyed:
            tokens.append(key)
        _write(child, tokens)


def _read(tokens: Iterator[Any], path: Path, depth: int) -> Branch | Leaf:
    token = next(tokens)
    if depth > DEPTH_MAX + 1 or type(token) is not str:
        raise ValueError("not a node")
    if token.startswith(_LEAF):
        return Leaf(path, note=token[len(_LEAF) :])
    if token not in _KINDS:
        raise ValueError("not a node")
    branch = Branch(path, _KINDS[token])
    count = next(tokens)
    if type(count) is not int:
        raise ValueError("not a count")
    index = branch.kind in ("list", "tuple")
    for number in range(count):
        key = number if index else next(tokens)
        branch.children[key] = _read(tokens, (*path, Step(key, index)), depth + 1)
    if len(branch.children) != count:
        raise ValueError("a key stands twice")
    return branch
