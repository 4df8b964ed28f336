"""Rules of the house that no single test of behaviour would notice being broken."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# Which packages each package may import, besides itself.
PACKAGES: dict[str, set[str]] = {
    "vitamp": set(),
    "utils": {"vitamp"},
    "models": {"utils", "vitamp"},
    "datasets": {"utils", "vitamp"},
    "engine": {"models", "datasets", "utils", "vitamp"},
    "tools": {"engine", "models", "datasets", "utils", "vitamp"},
    "scripts": {"tools", "engine", "models", "datasets", "utils", "vitamp"},
    "bench": {"tools", "engine", "models", "datasets", "utils", "vitamp"},
    "main": {"engine", "models", "datasets", "utils", "vitamp"},
}


def package_of(path: Path) -> str:
    first = path.relative_to(ROOT).parts[0]
    return "main" if first.startswith("main_") else first


CODE = {path: ast.parse(path.read_text(encoding="utf-8")) for path in sorted(ROOT.glob("main_*.py"))} | {
    path: ast.parse(path.read_text(encoding="utf-8"))
    for package in PACKAGES
    for path in sorted((ROOT / package).rglob("*.py"))
}


def imports(tree: ast.Module, package: tuple[str, ...] = ()) -> Iterator[str]:
    """Full dotted name of everything imported, at the top, inside functions, and by importlib."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            start = ".".join([*base, *([node.module] if node.module else [])])
            yield from (f"{start}.{alias.name}".lstrip(".") for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            yield from (str(name.value) for name in node.args[:1] if isinstance(name, ast.Constant))


def forbidden_imports(tree: ast.Module, package: str) -> list[str]:
    foreign = (set(PACKAGES) | {"tests"}) - PACKAGES[package] - {package}
    return [name for name in imports(tree, (package,)) if name.split(".")[0] in foreign or name.startswith("main_")]


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


def test_packages_import_only_packages_below_them() -> None:
    found = {path: forbidden_imports(tree, package_of(path)) for path, tree in CODE.items()}
    assert {path: names for path, names in found.items() if names} == {}


def test_no_modules_import_each_other_in_a_circle() -> None:
    """Imports under TYPE_CHECKING included: whoever reads one file of a circle has to read them all."""
    found: dict[str, set[str]] = {}
    known = {".".join(path.relative_to(ROOT).with_suffix("").parts) for path in CODE}
    for path, tree in CODE.items():
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        found[module] = set()
        for name in imports(tree, path.relative_to(ROOT).parent.parts):
            parent = name.rpartition(".")[0]
            # An imported name is a module, or is in one. A package's own `__init__` counts where it has the name.
            places = (name, f"{name}.__init__", parent, f"{parent}.__init__")
            found[module] |= {next((place for place in places if place in known), module)} - {module}
    assert circle(found) == []


def test_the_page_has_the_order_of_the_callbacks() -> None:
    """docs/architecture.md says why each has its place; engine/setup.py is where it has it."""
    code = (ROOT / "engine/setup.py").read_text(encoding="utf-8")
    built = re.findall(r"yield ([A-Z]\w+)\(", code)
    shown = re.findall(r"(?m)^\| `([A-Z]\w+)` \| ", (ROOT / "docs/architecture.md").read_text(encoding="utf-8"))
    assert shown == built != []


def test_torch_loads_weights_only() -> None:
    """Other calls that may run code hidden in a file are ruff's to find (S301, S506)."""
    calls = [node for tree in CODE.values() for node in ast.walk(tree) if isinstance(node, ast.Call)]
    loads = [ast.unparse(call) for call in calls if ast.unparse(call.func) == "torch.load"]
    assert loads
    assert all("weights_only=True" in load for load in loads), loads
