"""Recipes that come with vitamp, found by their name: `-cfg vit_digits`."""

from __future__ import annotations

import difflib
from functools import cache
from pathlib import Path

from utils.errors import UserError, either
from utils.log import warn_once
from utils.program import ROOT

FOLDER = ROOT / "configs"
ENDINGS = (".yaml", ".yml")
MOST_SUGGESTED = 3


def file_of(cfg: str) -> tuple[str, str]:
    """The file that -cfg names, and a line for the log if it is found by the name of a recipe. A file comes first."""
    path = Path(cfg)
    if path.is_file():
        if path.name == cfg and cfg in shipped():
            # At once, not among the notes of the settings: an error in this file's settings needs the explanation too.
            warn_once(
                f"-cfg {cfg}: the file {cfg} in the current folder is used, not the recipe of this name that comes "
                f"with vitamp ({_as_seen(shipped()[cfg])}). Rename the file, or name the recipe by this path."
            )
        return cfg, ""
    if path.suffix in ENDINGS:
        if path.stem in shipped() and not path.exists():
            raise UserError(f"{cfg}: no such file. Did you mean -cfg {path.stem}, a recipe that comes with vitamp?")
        return cfg, ""
    if path.name == cfg and cfg in shipped():
        file = str(_as_seen(shipped()[cfg]))
        return file, f"-cfg {cfg}: {file}, a recipe that comes with vitamp"
    if path.name == cfg and not path.exists():
        similar = difflib.get_close_matches(cfg, shipped(), MOST_SUGGESTED)
        suggestion = f" Did you mean {either(similar)}?" if similar else ""
        raise UserError(f"-cfg {cfg}: no such file, and no recipe of this name.{suggestion} {_folder_in_words()}")
    return cfg, ""


@cache
def shipped() -> dict[str, Path]:
    """Recipes by name. Files that begin with an underscore are parts of others."""
    return {file.stem: file for file in sorted(FOLDER.rglob("*.yaml")) if not file.name.startswith("_")}


def _folder_in_words() -> str:
    return f"The recipes are in {_as_seen(FOLDER)}; {_as_seen(ROOT / 'docs/recipes.md')} describes them."


def _as_seen(path: Path) -> Path:
    """Relative to the current folder, if it is below."""
    here = Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path
