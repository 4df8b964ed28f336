"""What is imported is asked for: a package that only comes along with another one may be gone with its next release."""

from __future__ import annotations

import ast
import re
import sys
from importlib.metadata import packages_distributions
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("utils", "models", "datasets", "engine", "tools", "scripts")


def imported() -> dict[str, str]:
    """Top names of all that is imported from elsewhere -> a file that does."""
    found: dict[str, str] = {}
    for path in [*ROOT.glob("main_*.py"), *(path for room in ROOMS for path in (ROOT / room).rglob("*.py"))]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and not node.level:
                names = [node.module or ""]
            found |= {name.partition(".")[0]: str(path.relative_to(ROOT)) for name in names}
    ours = {*sys.stdlib_module_names, *ROOMS, *(path.stem for path in ROOT.glob("main_*.py"))}
    return {name: file for name, file in found.items() if name not in ours}


def asked_for() -> set[str]:
    files = (ROOT / "requirements.txt", ROOT / "requirements-extra.txt")
    lines = [line for file in files for line in file.read_text(encoding="utf-8").splitlines()]
    return {word[0].lower().replace("_", "-") for line in lines if (word := re.match(r"[A-Za-z0-9_.-]+", line))}


def test_every_package_that_is_imported_is_in_the_requirements() -> None:
    distributions = packages_distributions()
    found = imported()
    assert "torch" in found
    missing = {
        f"{name} ({file})"
        for name, file in found.items()
        if not asked_for() & {dist.lower().replace("_", "-") for dist in distributions.get(name, [name])}
    }
    assert not missing
