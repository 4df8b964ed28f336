"""Which words tools/completion/words.py knows: written once into a file, since finding them out takes half a second.

python tools/completion/table.py FILE

Flags come from utils/cli.py and from the tools themselves, settings and their values from the schema, data sets from
the registry. Nothing here imports torch.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import importlib.util
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from utils.cli import FLAGS, Flag  # noqa: E402
from utils.config.keys import allowed, choices, settings  # noqa: E402
from utils.precisions import AMP_WORDS  # noqa: E402

ENTRIES = ("main_single_gpu.py", "main_multi_gpu.py")
FILE, FOLDER, YAML, MODEL = "file", "folder", "yaml", "model"
KINDS = {"DIR": FOLDER, "FILE": FILE, "PATH": FILE, "FROM": MODEL, "PATH|auto": FILE}
"""How a flag shows its value -> what to offer."""
OF_SETTINGS = {"MODEL.NAME": MODEL, "MODEL.PRETRAINED": MODEL, "TRAIN.TEACHER_MODEL": MODEL, "DATA.DATA_PATH": FOLDER}
OF_SETTINGS |= {"OUTPUT": FOLDER, "SAVE": FOLDER, "MODEL.RESUME": FILE, "DATA.EXCLUDE": FILE}
Takes = list[str] | str | None
"""Words to choose from, or a kind of them; None: nothing that could be offered."""
Option = dict[str, Any]


def table() -> dict[str, Any]:
    programs = {name: _program([flag for group in FLAGS.values() for flag in group]) for name in ENTRIES}
    for path in sorted((ROOT / "tools").glob("*/command.py")):
        name, text = path.parent.name, path.read_text(encoding="utf-8")
        if "\nOWN" in text or "\ndef _parser" in text:
            programs[f"{name}.py"] = _tool(importlib.import_module(f"tools.{name}.command"))
    programs["completion.py"] = {"flags": {}, "words": ["bash", "zsh", "fish"], "settings": False, "paths": None}
    timm = importlib.util.find_spec("timm")
    return {"programs": programs, "settings": _settings(), "timm": timm.origin if timm else None}


def _settings() -> dict[str, list[Any]]:
    """Those that can mean something: [what it is about, what it takes]."""
    known = {}
    for key, field in settings().items():
        extra = field.json_schema_extra if isinstance(field.json_schema_extra, dict) else {}
        if "accepted_because" not in extra:
            known[key] = [field.description or "", _of_setting(key)]
    return known


def _of_setting(key: str) -> Takes:
    if key == "DATA.DATASET":
        return [*_data_sets(), "hf:"]
    if "true" in allowed(key):
        return ["true", "false", *choices(key)]
    return choices(key) or OF_SETTINGS.get(key)


def _data_sets() -> list[str]:
    """The names in datasets/registry.py, read and not imported: that would import torch."""
    for node in ast.parse((ROOT / "datasets" / "registry.py").read_text(encoding="utf-8")).body:
        if (
            isinstance(node, ast.AnnAssign)
            and ast.unparse(node.target) == "SOURCES"
            and isinstance(node.value, ast.Dict)
        ):
            return [str(key.value) for key in node.value.keys if isinstance(key, ast.Constant)]
    raise LookupError("datasets/registry.py has no SOURCES: {name: ...}")


def _tool(module: Any) -> dict[str, Any]:
    if hasattr(module, "OWN"):
        shared = [flag for group in FLAGS.values() for flag in group if flag.action is None]
        own = [*module.OWN, *getattr(module, "FLAGS", ())]
        return _program([*own, *shared], [*getattr(module, "COMMANDS", ())])
    flags, words, paths = _of_parser(module._parser())
    return {"flags": flags, "words": words, "settings": False, "paths": paths}


def _program(flags: list[Flag], words: Sequence[str] = ()) -> dict[str, Any]:
    named = {f"-{flag.name}": _option(flag.about, _of_flag(flag), flag.value) for flag in reversed(flags)}
    return {"flags": dict(reversed(named.items())), "words": [*words], "settings": True, "paths": None}


def _of_flag(flag: Flag) -> Takes:
    if flag.name == "amp":
        return list[str](AMP_WORDS.split())
    if flag.name == "cfg":
        return YAML
    words = _of_setting(flag.keys[0]) if flag.keys and flag.keys[0] in settings() else None
    return words if isinstance(words, list) else KINDS.get(flag.value) or words


def _option(about: str, takes: Takes, value: str) -> Option:
    """`value`: how -h shows it; none, needed, or in brackets one that may be there."""
    return {
        "about": about,
        "takes": takes,
        "value": "no" if not value else "may" if value.startswith("[") else "needed",
    }


def _of_parser(parser: argparse.ArgumentParser) -> tuple[dict[str, Option], list[str], Takes]:
    """Flags, words and paths of a tool that argparse reads; those of its commands together."""
    flags: dict[str, Option] = {}
    words: list[str] = []
    paths: Takes = None
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, command in action.choices.items():
                words.append(name)
                more = _of_parser(command)
                flags, paths = more[0] | flags, paths or more[2]
        elif action.option_strings:
            shortest = next((name for name in action.option_strings if not name.startswith("--")), "")
            name = shortest or action.option_strings[0]
            value = "" if action.nargs == 0 else action.metavar or "VALUE"
            flags[name] = _option(action.help or "", _of_action(action), str(value))
        else:
            paths = paths or _of_action(action) or FILE
    return flags, words, paths


def _of_action(action: argparse.Action) -> Takes:
    if action.choices:
        return [str(choice) for choice in action.choices]
    metavar = str(action.metavar or "")
    return KINDS.get(metavar) or (FILE if action.type is Path else None)


def main(arguments: list[str]) -> int:
    if len(arguments) != 1:
        print(__doc__, file=sys.stderr)
        return 2
    out = Path(arguments[0])
    out.parent.mkdir(parents=True, exist_ok=True)
    temporary = out.with_name(f"{out.name}.{os.getpid()}")
    temporary.write_text(json.dumps(table()), encoding="utf-8")
    temporary.replace(out)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
