"""The start of every tool: a script of the folder above calls the tool of its name."""

import importlib
import sys
from pathlib import Path


def tool(script: str, room: str = "tools") -> None:
    """Run the tool of this script, of which the program's packages are beside `scripts/`, and exit with its code."""
    place = Path(script).resolve()
    program = place.parents[1]
    if not (program / room).is_dir():
        print(f"error: {place.stem} is not in the installed package; it needs a checkout of vitamp.", file=sys.stderr)
        sys.exit(2)
    sys.path.insert(0, str(program))
    sys.exit(importlib.import_module(f"{room}.{place.stem}.command").main(sys.argv[1:]))
