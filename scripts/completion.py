#!/usr/bin/env python3
"""Completion by TAB: flags, settings and their values, recipes, data sets, model names."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tools.completion.command import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
