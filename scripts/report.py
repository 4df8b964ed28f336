#!/usr/bin/env python3
"""A page about a run, or about several beside each other: figures, curves, confusion, mistakes, precision, time."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tools.report.command import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
