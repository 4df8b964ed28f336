"""The start of every tool: a script of the folder above calls the tool of its name."""

import importlib
import sys
from pathlib import Path


def tool(script: str) -> None:
    """Run the tool of this script, of which the program's packages are beside `scripts/`, and exit with its code."""
    place = Path(script).resolve()
    sys.path.insert(0, str(place.parents[1]))
    sys.exit(importlib.import_module(f"tools.{place.stem}.command").main(sys.argv[1:]))
