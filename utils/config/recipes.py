"""The file that -cfg names, if it is not the path of one: a recipe that comes with vitamp, or an error."""

from __future__ import annotations

import difflib
from pathlib import Path

from utils.errors import UserError, closest, either
from utils.program import ROOT


def recipe_file(cfg: str) -> tuple[str, list[str]]:
    """The file of a recipe, and a line for the log; or `cfg`, if it is a path."""
    # Files that begin with an underscore are parts of others.
    shipped = {file.stem: file for file in sorted(ROOT.glob("configs/*.yaml")) if not file.name.startswith("_")}
    path = Path(cfg)
    if cfg in shipped:
        file = _as_seen(shipped[cfg])
        return str(file), [f"-cfg {cfg}: {file}, a recipe that comes with vitamp"]
    if path.exists():
        return cfg, []
    if path.suffix in (".yaml", ".yml") and path.stem in shipped:
        raise UserError(f"{cfg}: no such file. Did you mean -cfg {path.stem}, a recipe that comes with vitamp?")
    if path.name == cfg and not path.suffix:
        similar = difflib.get_close_matches(cfg, shipped)
        suggestion = f" Did you mean {either(similar)}?" if similar else ""
        where = f"The recipes are in {_as_seen(ROOT / 'configs')}; {_as_seen(ROOT / 'docs/recipes.md')} describes them."
        raise UserError(f"-cfg {cfg}: no such file, and no recipe of this name.{suggestion} {where}")
    return cfg, []


def _as_seen(path: Path) -> Path:
    """Relative to the current folder, if it is below."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def similar_file(path: Path) -> str:
    """' Did you mean configs/x.yaml?' for a file that cannot be read; '' if it exists, or no name is close."""
    if path.exists() or not path.parent.is_dir():
        return "" if path.exists() else f" The folder {path.parent} does not exist either."
    files = {entry.stem: entry.name for entry in path.parent.iterdir()}
    match = closest(path.stem, files)
    return f" Did you mean {path.parent / files[match]}?" if match else ""
