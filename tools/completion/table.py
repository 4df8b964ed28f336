"""Table of all words that can be completed, written to a file for words.py: collecting them takes half a second.

python tools/completion/table.py FILE

Flags come from utils/flags.py and the tools, settings and their values from the schema, data sets from the registry.
Nothing here imports torch.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tools.common.command_line import Tool  # noqa: E402
from utils.config.fields import why_without_effect  # noqa: E402
from utils.config.keys import allowed, choices, settings  # noqa: E402
from utils.files import write_atomically  # noqa: E402
from utils.flags import BY_NAME, FLAGS, HELP, Flag  # noqa: E402
from utils.precisions import AMP_WORDS  # noqa: E402

ENTRIES = ("main_single_gpu.py", "main_multi_gpu.py")
FILE, FOLDER, YAML, MODEL = "file", "folder", "yaml", "model"
KINDS = {"DIR": FOLDER, "FILE": FILE, "PATH": FILE, "FROM": MODEL, "PATH|auto": FILE}
"""Placeholder of a flag's value -> kind of completion"""
OF_SETTINGS = {"MODEL.NAME": MODEL, "MODEL.PRETRAINED": MODEL, "TRAIN.TEACHER_MODEL": MODEL, "DATA.DATA_PATH": FOLDER}
OF_SETTINGS |= {"OUTPUT": FOLDER, "SAVE": FOLDER, "MODEL.RESUME": FILE, "DATA.EXCLUDE": FILE}
Takes = list[str] | str | None
"""Words to choose from, or a kind of completion; None: nothing to complete"""


def table() -> dict[str, Any]:
    every = [flag for group in FLAGS.values() for flag in group]
    programs = {name: _program(every, settings=True) for name in ENTRIES}
    for path in sorted((ROOT / "tools").glob("*/command.py")):
        module = importlib.import_module(f"tools.{path.parent.name}.command")
        tools: dict[str, Tool] = getattr(module, "COMMANDS", None) or {"": module.TOOL}
        programs[next(iter(tools.values())).name] = _tools([*tools.values()], [name for name in tools if name])
    timm = importlib.util.find_spec("timm")
    return {"programs": programs, "settings": _settings(), "timm": timm.origin if timm else None}


def _tools(tools: Sequence[Tool], commands: Sequence[str]) -> dict[str, Any]:
    """Words of a tool, with those of all its commands."""
    flags = [flag for tool in tools for flag in tool.flags]
    if settings_too := any(tool.settings for tool in tools):
        flags += [flag for flag in BY_NAME.values() if flag.action is None]
    places = [place for tool in tools for place in tool.places]
    words = [*commands, *(choice for place in places for choice in place.choices)]
    return _program(
        [*flags, *[HELP] * bool(flags)], words, FILE if places and not words[len(commands) :] else None, settings_too
    )


def _settings() -> dict[str, list[Any]]:
    """Settings that have an effect: key -> [description, what it takes]."""
    known = {}
    for key, field in settings().items():
        if not why_without_effect(field):
            known[key] = [field.description or "", _of_setting(key)]
    return known


def _of_setting(key: str) -> Takes:
    if key == "DATA.DATASET":
        return [*_data_sets(), "hf:"]
    if "true" in allowed(key):
        return ["true", "false", *choices(key)]
    return choices(key) or OF_SETTINGS.get(key)


def _data_sets() -> list[str]:
    """Names in datasets/registry.py, which is parsed, since importing it would import torch."""
    for node in ast.parse((ROOT / "datasets" / "registry.py").read_text(encoding="utf-8")).body:
        if (
            isinstance(node, ast.AnnAssign)
            and ast.unparse(node.target) == "SOURCES"
            and isinstance(node.value, ast.Dict)
        ):
            return [str(key.value) for key in node.value.keys if isinstance(key, ast.Constant)]
    raise LookupError("datasets/registry.py has no SOURCES: {name: ...}")


def _program(
    flags: Sequence[Flag], words: Sequence[str] = (), paths: Takes = None, settings: bool = False
) -> dict[str, Any]:
    named = {f"-{flag.name}": _option(flag) for flag in reversed(flags)}  # of two flags with one name the first counts
    return {"flags": dict(reversed(named.items())), "words": [*words], "settings": settings, "paths": paths}


def _option(flag: Flag) -> dict[str, Any]:
    value = "no" if not flag.value else "may" if flag.optional_value else "needed"
    return {"about": flag.about, "takes": _of_flag(flag), "value": value}


def _of_flag(flag: Flag) -> Takes:
    if flag.name == "amp":
        return list[str](AMP_WORDS.split())
    if flag.name == "cfg":
        return YAML
    words = _of_setting(flag.keys[0]) if flag.keys and flag.keys[0] in settings() else [*flag.choices] or None
    return words if isinstance(words, list) else KINDS.get(flag.value) or words or (FILE if flag.kind is Path else None)


def main(arguments: list[str]) -> int:
    if len(arguments) != 1:
        print(__doc__, file=sys.stderr)
        return 2
    out = Path(arguments[0])
    out.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(out, json.dumps(table()))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
