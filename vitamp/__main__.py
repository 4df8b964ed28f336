"""The command `vitamp`: starts a script of the program in this process, with the same flags as in a clone.

A started script finds its packages in its own folder, before all others. Other Python code does not find them at all.
"""

from __future__ import annotations

import ast
import difflib
import os
import sys
from pathlib import Path
from typing import NoReturn

HERE = Path(__file__).resolve().parent
PROGRAM = HERE / "program" if (HERE / "program").is_dir() else HERE.parent
"""Inside the installed package, or the clone around it"""
ENTRIES = {"train": "main_single_gpu.py", "multi": "main_multi_gpu.py"}
HEAD = """\
usage: vitamp COMMAND [-flag value ...] [KEY=VALUE ...]

Trains Vision Transformers, with -amp in mixed precision. For example:

  vitamp train -cfg vit_digits -amp -output runs/digits
  vitamp report runs/digits
"""
EXIT_USAGE = 2


def main() -> NoReturn:
    name, *words = sys.argv[1:] or ["-h"]
    tools = sorted((PROGRAM / "scripts").glob("*.py"))
    scripts = {name: PROGRAM / file for name, file in ENTRIES.items()} | {file.stem: file for file in tools}
    if name.lstrip("-") in ("h", "help"):
        print(_help(scripts))
        sys.exit(0)
    if name.lstrip("-") == "version":
        name, words = "train", ["-version"]
    if name not in scripts:
        print(f"error: {_unknown(name, scripts)} vitamp -h lists the commands.", file=sys.stderr)
        sys.exit(EXIT_USAGE)
    os.execv(sys.executable, [sys.executable, str(scripts[name]), *words])


def _unknown(name: str, scripts: dict[str, Path]) -> str:
    if name.startswith("-") or "=" in name:
        return f"the command is missing before {name!r}. Did you mean vitamp train {name}?"
    similar = difflib.get_close_matches(name.removesuffix(".py"), scripts, n=1)
    return f"unknown command {name!r}.{f' Did you mean {similar[0]}?' if similar else ''}"


def _help(scripts: dict[str, Path]) -> str:
    """All commands, each with the first line of its script."""
    lines = [HEAD, "commands:"]
    for name, script in scripts.items():
        about = ast.get_docstring(ast.parse(script.read_text(encoding="utf-8"))) or ""
        lines.append(f"  {name:<18}{about.partition(chr(10))[0]}")
    return "\n".join([*lines, "", f"vitamp COMMAND -h lists its flags. The pages of docs/ are in {PROGRAM / 'docs'}."])


if __name__ == "__main__":
    main()
