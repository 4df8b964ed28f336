"""The command `vitamp`: replaces this process by a script of the program, with the same flags as in a clone.

The script finds the program's packages in its own folder, before all others. Other Python code does not find them.
"""

import ast
import difflib
import os
import sys
from pathlib import Path
from typing import NoReturn

HERE = Path(__file__).resolve().parent
PROGRAM = HERE / "program" if (HERE / "program").is_dir() else HERE.parent
"""The folder of the program: inside the installed package, or the clone around it."""
ENTRIES = {"train": "main_single_gpu.py", "multi": "main_multi_gpu.py"}
HEAD = """\
usage: vitamp COMMAND [-flag value ...] [KEY=VALUE ...]

Trains Vision Transformers, with -amp in mixed precision. For example:

  vitamp train -cfg vit_digits -amp -output runs/digits
  vitamp report runs/digits
"""
EXIT_USAGE = 2


def main() -> NoReturn:
    """Run the command in sys.argv, and exit with its exit code; -h lists the commands."""
    command, *arguments = sys.argv[1:] or ["-h"]
    tools = sorted((PROGRAM / "scripts").glob("*.py"))
    scripts = {name: PROGRAM / file for name, file in ENTRIES.items()} | {file.stem: file for file in tools}

    if command.lstrip("-") in ("h", "help"):
        lines = [HEAD, "commands:"]
        for name, script in scripts.items():
            # The first line of the script's docstring describes the command.
            docstring = ast.get_docstring(ast.parse(script.read_text(encoding="utf-8"))) or ""
            first_line = docstring.partition("\n")[0]
            lines.append(f"  {name:<18}{first_line}")
        lines.append(f"\nvitamp COMMAND -h lists its flags. The pages of docs/ are in {PROGRAM / 'docs'}.")
        print("\n".join(lines))
        sys.exit(0)

    if command.lstrip("-") == "version":  # The flag -version of `train` prints it.
        command = "train"
        arguments = ["-version"]
    if command not in scripts:
        similar = difflib.get_close_matches(command.removesuffix(".py"), scripts, n=1)
        problem = f"unknown command {command!r}."
        is_flag_or_setting = command.startswith("-") or "=" in command
        if is_flag_or_setting:
            problem = f"the command is missing before {command!r}. Did you mean vitamp train {command}?"
        elif similar:
            problem += f" Did you mean {similar[0]}?"
        print(f"error: {problem} vitamp -h lists the commands.", file=sys.stderr)
        sys.exit(EXIT_USAGE)
    os.execv(sys.executable, [sys.executable, str(scripts[command]), *arguments])


if __name__ == "__main__":
    main()
