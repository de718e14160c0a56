"""The house rules that a machine can check. CONTRIBUTING.md says why they are there."""

from __future__ import annotations

import ast
import re
import tokenize
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "groupio"

MODULE_LINES_MAX = 1_000
FUNCTION_LINES_MAX = 70
COLUMNS_MAX = 100

PURE = ("plan", "protocol", "format", "model.py", "errors.py", "testing/invariants.py")
IMPURE_MODULES = frozenset(
    (
        *("asyncio", "concurrent", "ctypes", "datetime", "fcntl", "mmap", "multiprocessing", "os"),
        *("pathlib", "random", "secrets", "selectors", "shutil", "signal", "socket", "subprocess"),
        *("tempfile", "threading", "time", "torch", "uuid"),
    )
)
PICKLERS = frozenset({"pickle", "_pickle", "cPickle", "dill", "cloudpickle", "shelve", "marshal"})
CLI_ONLY = frozenset({"typer", "rich", "click"})
TORCH_PACKAGES = ("torch", "demo", "testing", "bench")

CHANGELOG_SECTIONS = {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}
MACHINE_PATH = re.compile(r"(?<![\w.<$}])/(?:work|root|home|Users|mnt/data)/(?!<)\w")
QUESTION = re.compile(r"(?:What|Which|Who|Whose|Where|How|Why|When|Whether)\b")
UNOWNED_NOTE = re.compile(r"\b(?:TODO|FIXME|XXX|HACK)\b(?!\([a-z][\w-]*\))")


def python_files(*roots: Path) -> list[Path]:
    return sorted(path for root in roots for path in root.rglob("*.py"))


SOURCES = python_files(PACKAGE)
EVERYTHING = python_files(ROOT / "src", ROOT / "tests", ROOT / "benchmarks")
TEXTS = [
    path
    for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), ROOT / "Makefile", *EVERYTHING]
    if path != Path(__file__).resolve()
]


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def inside(path: Path, *parts: str) -> bool:
    relative = path.relative_to(PACKAGE).as_posix()
    return any(relative == part or relative.startswith(part + "/") for part in parts)


def functions(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def imported(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and full name of every imported module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            yield node.lineno, "." * node.level + (node.module or "")


def calls(tree: ast.Module) -> Iterator[tuple[ast.Call, str]]:
    """Every call with the dotted name that is called."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield node, ast.unparse(node.func)


def report(problems: list[str]) -> None:
    assert not problems, "\n" + "\n".join(problems)


def test_modules_are_short() -> None:
    sizes = {name_of(p): len(p.read_text(encoding="utf-8").splitlines()) for p in EVERYTHING}
    report(
        [f"{n}: {s} lines > {MODULE_LINES_MAX}" for n, s in sizes.items() if s > MODULE_LINES_MAX]
    )


def test_functions_are_short() -> None:
    problems = []
    for path in EVERYTHING:
        for node in functions(tree_of(path)):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > FUNCTION_LINES_MAX:
                problems.append(f"{name_of(path)}:{node.lineno} {node.name}: {length} lines")
    report(problems)


def test_lines_fit_in_100_columns() -> None:
    report(
        [
            f"{name_of(path)}:{number}: {len(line)} columns"
            for path in EVERYTHING
            for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
            if len(line) > COLUMNS_MAX
        ]
    )


def undocumented(body: list[ast.stmt], prefix: str) -> Iterator[tuple[int, str]]:
    for node in body:
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            if ast.get_docstring(node) is None:
                yield node.lineno, prefix + node.name
            yield from undocumented(node.body, f"{prefix}{node.name}.")
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            decorators = {ast.unparse(d).rpartition(".")[2] for d in node.decorator_list}
            # A test's name says what it proves.
            exempt = node.name.startswith(("_", "test_")) or decorators & {
                "overload",
                "override",
                "setter",
            }
            if not exempt and ast.get_docstring(node) is None:
                yield node.lineno, prefix + node.name


def test_every_public_name_has_a_docstring() -> None:
    problems = []
    for path in SOURCES:
        tree = tree_of(path)
        if tree.body and ast.get_docstring(tree) is None:
            problems.append(f"{name_of(path)}: the module has no docstring")
        problems += [f"{name_of(path)}:{line} {name}" for line, name in undocumented(tree.body, "")]
    report(problems)


def test_module_docstrings_say_what_the_module_is_or_does() -> None:
    docs = ((path, ast.get_docstring(tree_of(path)) or "") for path in SOURCES)
    report([f"{name_of(path)}: {doc.splitlines()[0]}" for path, doc in docs if QUESTION.match(doc)])


def test_annotations_are_deferred_and_imports_absolute() -> None:
    problems = []
    for path in EVERYTHING:
        tree = tree_of(path)
        code = [node for node in tree.body if not isinstance(node, ast.Expr)]
        if code and "__future__" not in {name for _, name in imported(tree)}:
            problems.append(f"{name_of(path)}: no `from __future__ import annotations`")
        for line, name in imported(tree):
            if name.startswith("."):
                problems.append(f"{name_of(path)}:{line}: relative import")
    report(problems)


def test_functions_state_their_types() -> None:
    problems = []
    for path in SOURCES:
        for node in functions(tree_of(path)):
            if node.returns is None:
                problems.append(f"{name_of(path)}:{node.lineno} {node.name}: no return type")
    report(problems)


def test_pure_packages_import_nothing_impure() -> None:
    problems = []
    for path in SOURCES:
        if not inside(path, *PURE):
            continue
        for line, name in imported(tree_of(path)):
            if name.split(".")[0] in IMPURE_MODULES:
                problems.append(f"{name_of(path)}:{line}: a pure module imports {name}")
    report(problems)


FACTORIES = frozenset(
    {
        *(
            "empty",
            "empty_like",
            "empty_strided",
            "zeros",
            "zeros_like",
            "ones",
            "ones_like",
            "eye",
        ),
        *("full", "full_like", "tensor", "as_tensor", "asarray", "scalar_tensor", "arange"),
        *("linspace", "logspace", "rand", "randn", "randint", "randperm", "rand_like"),
        *("new_empty", "new_zeros", "new_ones", "new_full", "new_tensor", "randn_like"),
    }
)
"""Functions of torch that make tensors on the process's default device, or on one that is given."""


def factory_without_device(call: ast.Call, name: str) -> bool:
    """Whether the call makes a tensor wherever the program's default device happens to be."""
    owner, _, function = name.rpartition(".")
    made = function in FACTORIES and (owner == "torch" or function.startswith("new_"))
    return made and not {"device", "out"} & {keyword.arg for keyword in call.keywords}


def test_every_new_tensor_names_its_device() -> None:
    problems = []
    for path in SOURCES:
        for call, name in calls(tree_of(path)):
            if not inside(path, "testing") and factory_without_device(call, name):
                problems.append(f"{name_of(path)}:{call.lineno}: {name} without device=")
    report(problems)


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("torch.empty(3)", True),
        ("torch.empty(3, device=d)", False),
        ("x.new_zeros(3)", True),
        ("np.empty(3)", False),
        ("torch.from_numpy(x)", False),
    ],
)
def test_the_check_of_devices_finds_what_it_is_for(code: str, found: bool) -> None:
    ((call, name),) = calls(ast.parse(code))
    assert factory_without_device(call, name) == found


def test_typer_rich_and_torch_stay_in_their_places() -> None:
    problems = []
    for path in SOURCES:
        for line, name in imported(tree_of(path)):
            top = name.split(".")[0]
            if top in CLI_ONLY and not inside(path, "cli", "demo"):
                problems.append(f"{name_of(path)}:{line}: {name} belongs to the command line")
            if top == "torch" and not inside(path, *TORCH_PACKAGES):
                problems.append(f"{name_of(path)}:{line}: only the torch adapter imports {name}")
    report(problems)


def test_nothing_unpickles_evaluates_or_runs_a_shell() -> None:
    problems = []
    for path in SOURCES:
        tree = tree_of(path)
        where = name_of(path)
        for line, name in imported(tree):
            if name.split(".")[0] in PICKLERS:
                problems.append(f"{where}:{line}: import of {name}")
        for call, name in calls(tree):
            keywords = {k.arg: k.value for k in call.keywords}
            shell = keywords.get("shell")
            if name in {"eval", "exec", "compile", "__import__", "yaml.load", "os.system"}:
                problems.append(f"{where}:{call.lineno}: call of {name}")
            if isinstance(shell, ast.Constant) and shell.value:
                problems.append(f"{where}:{call.lineno}: shell=True")
            if name == "torch.load" and "weights_only" not in keywords:
                problems.append(f"{where}:{call.lineno}: torch.load without weights_only")
    report(problems)


def test_every_except_names_its_error() -> None:
    report(
        [
            f"{name_of(path)}:{node.lineno}: bare except"
            for path in EVERYTHING
            for node in ast.walk(tree_of(path))
            if isinstance(node, ast.ExceptHandler) and node.type is None
        ]
    )


def test_only_programs_print() -> None:
    report(
        [
            f"{name_of(path)}:{call.lineno}: print belongs to the command line"
            for path in SOURCES
            if not inside(path, "cli", "demo") and path.name != "__main__.py"
            for call, name in calls(tree_of(path))
            if name == "print"
        ]
    )


def test_open_notes_have_an_owner() -> None:
    problems = []
    for path in EVERYTHING:
        if path == Path(__file__).resolve():
            continue
        with tokenize.open(path) as lines:
            for token in tokenize.generate_tokens(lines.readline):
                if token.type == tokenize.COMMENT and UNOWNED_NOTE.search(token.string):
                    problems.append(f"{name_of(path)}:{token.start[0]}: {token.string}")
    report(problems)


def test_no_path_of_one_machine() -> None:
    report(
        [
            f"{name_of(path)}:{number}: {line.strip()}"
            for path in TEXTS
            for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
            if MACHINE_PATH.search(line)
        ]
    )


def test_test_modules_have_unique_names_and_no_packages() -> None:
    names = Counter(path.name for path in (ROOT / "tests").rglob("*.py"))
    names.pop("conftest.py", None)
    report([f"{name}: {count} files of this name" for name, count in names.items() if count > 1])
    assert not list((ROOT / "tests").rglob("__init__.py"))


def test_changelog_keeps_its_format() -> None:
    lines = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8").splitlines()
    assert lines[0] == "# Changelog"
    versions, problems = [], []
    for number, line in enumerate(lines, 1):
        where = f"CHANGELOG.md:{number}"
        if line.startswith("## "):
            heading = re.fullmatch(r"## (Unreleased|(\d+\.\d+\.\d+) - \d{4}-\d{2}-\d{2})", line)
            if heading is None:
                problems.append(f"{where}: not '## Unreleased' or '## X.Y.Z - YYYY-MM-DD'")
            versions.append(heading[2] if heading and heading[2] else "Unreleased")
        elif line.startswith("### ") and line[4:] not in CHANGELOG_SECTIONS:
            problems.append(f"{where}: section must be one of {sorted(CHANGELOG_SECTIONS)}")
        elif line and not line.startswith(("#", "- ", "  ")) and versions:
            problems.append(f"{where}: entries are bullets, continued by two spaces")
    report(problems)
    assert versions, "the changelog lists no version"
    assert versions[1:] == sorted(
        versions[1:], key=lambda v: tuple(map(int, v.split("."))), reverse=True
    )


@pytest.mark.parametrize("name", ["LICENSE", "README.md", "SECURITY.md", "CONTRIBUTING.md"])
def test_the_files_that_a_project_needs_are_there(name: str) -> None:
    assert (ROOT / name).stat().st_size > 500


def test_version_is_stated_once() -> None:
    stated = re.search(r'^version = "([^"]+)"', (ROOT / "pyproject.toml").read_text(), re.M)
    assert stated is not None
    assert (PACKAGE / "py.typed").exists()
    repeated = [
        name_of(path)
        for path in SOURCES
        if re.search(r'^__version__ = "', path.read_text(encoding="utf-8"), re.M)
    ]
    assert len(repeated) <= 1
    for name in repeated:
        assert f'__version__ = "{stated[1]}"' in (ROOT / name).read_text(encoding="utf-8")
