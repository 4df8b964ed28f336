"""The command `vitamp`: starts a script of the program in this process, with the same flags as in a clone.

A started script finds its packages in its own folder, before all others. Other Python code does not find them at all.
"""

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
        lines = [HEAD, "commands:"]  # each with the first line of its script
        for name, script in scripts.items():
            about = ast.get_docstring(ast.parse(script.read_text(encoding="utf-8"))) or ""
            lines.append(f"  {name:<18}{about.partition(chr(10))[0]}")
        lines.append(f"\nvitamp COMMAND -h lists its flags. The pages of docs/ are in {PROGRAM / 'docs'}.")
        print("\n".join(lines))
        sys.exit(0)
    if name.lstrip("-") == "version":
        name = "train"
        words = ["-version"]
    if name not in scripts:
        similar = difflib.get_close_matches(name.removesuffix(".py"), scripts, n=1)
        problem = f"unknown command {name!r}."
        if name.startswith("-") or "=" in name:
            problem = f"the command is missing before {name!r}. Did you mean vitamp train {name}?"
        elif similar:
            problem += f" Did you mean {similar[0]}?"
        print(f"error: {problem} vitamp -h lists the commands.", file=sys.stderr)
        sys.exit(EXIT_USAGE)
    os.execv(sys.executable, [sys.executable, str(scripts[name]), *words])


if __name__ == "__main__":
    main()
