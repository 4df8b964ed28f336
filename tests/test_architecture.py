"""Rules of the house that no single test of behaviour would notice being broken."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.lint import for_each

ROOT = Path(__file__).resolve().parent.parent

# Which packages each package may import, besides itself.
ROOMS: dict[str, set[str]] = {
    "vitamp": set(),
    "utils": {"vitamp"},
    "models": {"utils", "vitamp"},
    "datasets": {"utils", "vitamp"},
    "engine": {"models", "datasets", "utils", "vitamp"},
    "tools": {"engine", "models", "datasets", "utils", "vitamp"},
    "scripts": {"tools", "engine", "models", "datasets", "utils", "vitamp"},
    "main": {"engine", "models", "datasets", "utils", "vitamp"},
}
KEPT_HIDDEN, LEFT_BEHIND = {".ci", ".gitignore"}, {"output", "data", "node_modules"}
OLD_NAMES = ("torch.cuda.amp", "torch.cpu.amp", "apex")
# Calls that may run code hidden in the file they read.
UNSAFE_CALLS = {"yaml.load", "yaml.unsafe_load", "yaml.full_load", "pickle.load", "pickle.loads", "pickle.Unpickler"}


def project_files() -> list[Path]:
    """Every file of the project, without what tools and runs leave behind; works without git as well."""
    tops = (p for p in ROOT.iterdir() if p.name in KEPT_HIDDEN or not p.name.startswith("."))
    files: list[Path] = []
    for top in tops:
        if top.name not in LEFT_BEHIND:
            files += [top] if top.is_file() else [p for p in top.rglob("*") if p.is_file()]
    return [p for p in files if p.suffix != ".pyc"]


def room_of(path: Path) -> str | None:
    first = path.relative_to(ROOT).parts[0]
    if first.startswith("main_") and first.endswith(".py"):
        return "main"
    return first if first in ROOMS else None


CODE = sorted(p for p in project_files() if p.suffix == ".py" and room_of(p))


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def imports(tree: ast.Module, package: tuple[str, ...] = ()) -> Iterator[tuple[int, str]]:
    """(line, full dotted name) of everything imported, at the top, inside functions, and by importlib."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            start = ".".join([*base, *([node.module] if node.module else [])])
            yield from ((node.lineno, f"{start}.{alias.name}".lstrip(".")) for alias in node.names)
        elif isinstance(node, ast.Call) and dotted(node.func) in {"importlib.import_module", "import_module"}:
            name = node.args[0] if node.args else None
            if isinstance(name, ast.Constant) and isinstance(name.value, str):
                yield node.lineno, name.value


def dotted(node: ast.expr) -> str:
    """`a.b.c` of an expression of that form, else the part that has it."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}".lstrip(".")
    return node.id if isinstance(node, ast.Name) else ""


def forbidden_imports(tree: ast.Module, room: str, package: tuple[str, ...] = ()) -> list[str]:
    foreign = (set(ROOMS) | {"tests"}) - ROOMS[room] - {room}
    found = []
    for line, name in imports(tree, package):
        top = name.split(".")[0]
        if top in foreign or top.startswith("main_"):
            found.append(f"line {line}: {name}")
    return found


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


@cache
def module_imports() -> dict[str, set[str]]:
    """Every module of the product (a package by its `__init__`) -> those of them that it imports anywhere."""
    known = {module_name(path) for path in CODE}

    def module_of(name: str) -> str | None:
        """The module that an imported name is, or is in. A package's own `__init__` counts where it has the name."""
        places = (name, f"{name}.__init__", name.rpartition(".")[0], f"{name.rpartition('.')[0]}.__init__")
        return next((place for place in places if place in known), None)

    return {
        module_name(path): {
            module
            for _, name in imports(tree_of(path), path.relative_to(ROOT).parent.parts)
            if (module := module_of(name)) and module != module_name(path)
        }
        for path in CODE
    }


def circle(found: dict[str, set[str]]) -> list[str]:
    """Some modules that import each other in a circle, each the next one; empty where there is no circle."""
    rest = {name: imported & found.keys() for name, imported in found.items()}
    while done := [name for name, imported in rest.items() if not imported & rest.keys()]:
        for name in done:
            del rest[name]
    way: list[str] = []
    while rest and (not way or way[-1] not in way[:-1]):
        way.append(min(rest[way[-1]] & rest.keys()) if way else min(rest))
    return way[way.index(way[-1]) :] if way else []


def unsafe_calls(tree: ast.Module) -> list[str]:
    found = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name = dotted(node.func)
        if name == "torch.load":
            safe = [k for k in node.keywords if k.arg == "weights_only"]
            if not (safe and isinstance(safe[0].value, ast.Constant) and safe[0].value.value is True):
                found.append(f"line {node.lineno}: torch.load without weights_only=True")
        elif any(k.arg == "allow_pickle" and ast.unparse(k.value) != "False" for k in node.keywords):
            found.append(f"line {node.lineno}: {name} with allow_pickle")
        elif name in UNSAFE_CALLS and not has_own_loader(node, name):
            found.append(f"line {node.lineno}: {name}")
    return found


def has_own_loader(node: ast.Call, name: str) -> bool:
    """yaml.load is as safe as its loader, and one derived from SafeLoader is fine: it must be named so."""
    loaders = [dotted(k.value) for k in node.keywords if k.arg == "Loader"] + [dotted(a) for a in node.args[1:]]
    return name == "yaml.load" and bool(loaders) and all("Safe" in loader for loader in loaders)


@for_each(CODE)
def test_a_room_imports_only_rooms_below_it(path: Path) -> None:
    room = room_of(path)
    assert room is not None
    assert forbidden_imports(tree_of(path), room, path.relative_to(ROOT).parent.parts) == []


def test_no_modules_import_each_other_in_a_circle() -> None:
    """Imports under TYPE_CHECKING included: whoever reads one file of a circle has to read them all."""
    assert circle(module_imports()) == []


def test_the_page_has_the_order_of_the_abilities() -> None:
    """docs/architecture.md says why each has its place; engine/setup.py is where it has it."""
    code = (ROOT / "engine/setup.py").read_text(encoding="utf-8")
    first, last, *between = re.findall(r"(?:yield |= \[)([A-Z]\w+)\(", code)
    shown = re.findall(r"(?m)^\| `([A-Z]\w+)` \| ", (ROOT / "docs/architecture.md").read_text(encoding="utf-8"))
    assert shown == [first, *between, last]


@for_each(CODE)
def test_nothing_is_loaded_that_could_run_code(path: Path) -> None:
    assert unsafe_calls(tree_of(path)) == []


@for_each(CODE)
def test_amp_comes_from_todays_names(path: Path) -> None:
    tree = tree_of(path)
    used = [name for _, name in imports(tree)]
    used += [dotted(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    assert [name for name in used if any(name == old or name.startswith(f"{old}.") for old in OLD_NAMES)] == []


def test_no_file_depends_on_where_it_was_written() -> None:
    """Absolute folders of one machine mean nothing on another. This file is left out: it names them."""
    folder = re.compile(rb"/work\b")
    found = []
    for path in project_files():
        if path != Path(__file__).resolve() and folder.search(path.read_bytes()):
            found.append(str(path.relative_to(ROOT)))
    assert found == []


def test_our_datasets_folder_is_the_one_imported() -> None:
    """Hugging Face's package of the same name must never win."""
    import datasets

    assert [Path(p).resolve() for p in datasets.__path__] == [ROOT / "datasets"]


@pytest.mark.parametrize(
    ("room", "source"),
    [
        ("utils", "import models"),
        ("utils", "def f():\n    from engine.loop import train"),
        ("models", "from datasets import build"),
        ("models", "import importlib\nimportlib.import_module('datasets.sources.digits')"),
        ("datasets", "from .. import models"),
        ("engine", "import main_single_gpu"),
        ("engine", "import tools.report.command"),
        ("engine", "from tests.helpers import x"),
    ],
)
def test_the_import_rule_sees_offences_alone(room: str, source: str) -> None:
    assert forbidden_imports(ast.parse(source), room, (room,)) != []
    assert forbidden_imports(ast.parse("from .weights import load\nimport timm.models, torch"), "models") == []


def test_circles_are_seen() -> None:
    assert circle({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": set()}) == ["b", "c", "b"]
    assert circle({"a": {"b"}, "b": {"c"}, "c": set()}) == []


@pytest.mark.parametrize(
    "source",
    [
        "torch.load(f)",
        "torch.load(f, weights_only=flag)",
        "yaml.load(f, Loader=yaml.FullLoader)",
        "yaml.load(f, yaml.UnsafeLoader)",
        "np.load(f, allow_pickle=True)",
        "pickle.load(f)",
    ],
)
def test_unsafe_calls_alone_are_seen(source: str) -> None:
    safe = "torch.load(f, map_location='cpu', weights_only=True)\nyaml.safe_load(f)\nyaml.load(f, Loader=SafeLoader)"
    assert len(unsafe_calls(ast.parse(f"{source}\n{safe}"))) == 1
