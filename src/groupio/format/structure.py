"""The structure record: how the named leaves of a nested state dict stand in it.

Names are those that ``torch.distributed.checkpoint`` gives (its FQNs): the keys of nested mappings
and the indexes of traversed lists, joined by dots. Where such a name is no item name or stands for
two leaves (``{"a.b": x, "a": {"b": y}}``, ``{1: x, "1": y}``), every leaf concerned is named by its
path instead; the structure record keeps the paths apart and the types of the keys.

A large container without tensors is one leaf, whole, under its own name: its item has all of it.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from groupio.errors import FormatError, InvalidInput
from groupio.format.containers import make_container

RESERVED = "groupio:"
"""Prefix of the item names that the adapter makes; a user's name of this form is escaped."""

STRUCTURE = RESERVED + "structure"
"""The item that holds the structure record of one rank."""

PATHS = RESERVED + "paths"
"""The item with which the DCP classes keep the paths of the names: a dict of name -> list of the
keys (str) and indexes (int) that lead to it. They save no structure record."""

KEYS = RESERVED + "keys"
"""The item with which the DCP classes keep the types of keys and containers, where the planner
knows them: a structure record of the state dict as DCP takes it apart."""

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
STRUCTURE_VERSION_MAX = 2
"""Version of a record with containers that the first version does not have, or a detail of one."""

_OPEN = {"dict": "{", "odict": "{o", "list": "[", "tuple": "("}
_OPEN_NEWER = {
    **{kind: "{" + kind for kind in ("defaultdict", "Counter", "UserDict")},
    **{kind: "[" + kind for kind in ("UserList", "deque")},
    "namedtuple": "(namedtuple",
}
_KINDS = {token: kind for kind, token in (_OPEN | _OPEN_NEWER).items()}
_KEYED = frozenset(kind for token, kind in _KINDS.items() if token.startswith("{"))
_LEAF = "="
_WHOLE = "#"
_DETAIL = "+"


class Step(NamedTuple):
    """One step of a path: a key of a mapping, or an index of a list or tuple."""

    key: Any
    indexed: bool


Path = tuple[Step, ...]


@dataclass(slots=True)
class Leaf:
    """A value of the state dict. ``note`` is what its item table cannot say, usually nothing.

    ``whole``: the value is a large container without tensors, which is not taken apart.
    """

    path: Path
    value: Any = None
    name: str = ""
    note: str = ""
    whole: bool = False


@dataclass(slots=True)
class Branch:
    """A mapping, list or tuple of the state dict; ``children`` by key or index, in order.

    ``detail`` is what its kind needs besides them: the name of a defaultdict's factory, a deque's
    ``maxlen``, (name, fields) of a named tuple, ``_metadata`` of an OrderedDict, else None. ``was``
    is the name of its class where that is an unknown one, of which it comes back as ``kind``.
    """

    path: Path
    kind: str
    children: dict[Any, Branch | Leaf] = field(default_factory=dict)
    value: Any = None
    detail: Any = None
    was: str = ""

    @property
    def keyed(self) -> bool:
        """Whether the children are those of a mapping."""
        return self.kind in _KEYED

    def branches(self) -> Iterator[Branch]:
        """This one, and all below."""
        yield self
        for child in self.children.values():
            if isinstance(child, Branch):
                yield from child.branches()

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
    if _write(root, tokens):
        tokens[0] = STRUCTURE_VERSION_MAX
    return tokens


def decode_structure(tokens: Any) -> Branch:
    """The tree of a structure record, its leaves named but without values.

    Raises FormatError when the record is not one of this version.
    """
    known = range(STRUCTURE_VERSION, STRUCTURE_VERSION_MAX + 1)
    if not isinstance(tokens, list) or not tokens or tokens[0] not in known:
        version = tokens[0] if isinstance(tokens, list) and tokens else type(tokens).__name__
        raise FormatError(
            f"structure record of version {version!r} cannot be read by this release; "
            f"it reads versions {STRUCTURE_VERSION} to {STRUCTURE_VERSION_MAX}"
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
    return make_branch(
        node, {key: rebuild(child, value_of) for key, child in node.children.items()}
    )


def make_branch(branch: Branch, built: dict[Any, Any]) -> Any:
    """A container like ``branch`` of the values of ``built``.

    InvalidInput when its detail is none of its kind.
    """
    kind, detail = branch.kind, branch.detail
    match kind:
        case "list":
            return list(built.values())
        case "tuple":
            return tuple(built.values())
        case "dict":
            return built
        case "odict":
            made = OrderedDict(built)
            if detail is not None:
                made._metadata = detail  # type: ignore[attr-defined]
            return made
        case "defaultdict":
            return make_container(kind, (detail, built))
        case "deque":
            return make_container(kind, (detail, list(built.values())))
        case "namedtuple":
            if type(detail) is not tuple or len(detail) != 2:
                raise InvalidInput("a named tuple without a name and fields")
            return make_container(kind, (*detail, tuple(built.values())))
        case _:
            return make_container(kind, built if branch.keyed else list(built.values()))


def _is_item_name(name: str) -> bool:
    if not name or "\0" in name or name.startswith(RESERVED):
        return False
    if name.isascii():
        return len(name) <= NAME_BYTES_MAX
    try:
        return len(name.encode("utf-8")) <= NAME_BYTES_MAX
    except UnicodeEncodeError:  # a lone surrogate, which repr() escapes
        return False


def _write(node: Branch | Leaf, tokens: list[Any]) -> bool:
    """Whether the record is one of the newer version."""
    if isinstance(node, Leaf):
        tokens.append(_WHOLE if node.whole else _LEAF + node.note)
        return node.whole
    newer = node.detail is not None or node.was != "" or node.kind in _OPEN_NEWER
    if node.detail is not None or node.was:
        tokens += (_DETAIL, (node.detail, node.was))
    tokens += (_OPEN.get(node.kind) or _OPEN_NEWER[node.kind], len(node.children))
    keyed = node.keyed
    for key, child in node.children.items():
        if keyed:
            tokens.append(key)
        newer |= _write(child, tokens)
    return newer


def _read(tokens: Iterator[Any], path: Path, depth: int) -> Branch | Leaf:
    token = next(tokens)
    if depth > DEPTH_MAX + 1 or type(token) is not str:
        raise ValueError("not a node")
    if token.startswith(_LEAF):
        return Leaf(path, note=token[len(_LEAF) :])
    if token == _WHOLE:
        return Leaf(path, whole=True)
    detail: Any = None
    was = ""
    if token == _DETAIL:
        detail, was = next(tokens)
        token = next(tokens)
    if type(was) is not str or token not in _KINDS:
        raise ValueError("not a node")
    branch = Branch(path, _KINDS[token], detail=detail, was=was)
    count = next(tokens)
    if type(count) is not int:
        raise ValueError("not a count")
    index = not branch.keyed
    for number in range(count):
        key = number if index else next(tokens)
        branch.children[key] = _read(tokens, (*path, Step(key, index)), depth + 1)
    if len(branch.children) != count:
        raise ValueError("a key stands twice")
    if branch.kind in _OPEN_NEWER or detail is not None:
        _check_detail(branch)
    return branch


def _check_detail(branch: Branch) -> None:
    if branch.kind == "odict":
        fits = isinstance(branch.detail, Mapping)
    else:
        fits = branch.kind in _OPEN_NEWER
    if not fits:
        raise ValueError("a detail of another kind")
    try:
        make_branch(branch, dict.fromkeys(branch.children))
    except InvalidInput as error:
        raise ValueError("a detail that does not fit") from error
