#!/usr/bin/env python3
"""Shell completion of flags, settings, their values, recipes, data sets and model names."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tools.completion.command import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
