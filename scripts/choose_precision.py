#!/usr/bin/env python3
"""Which precision should I train in? Measured on your own model and data."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tools.choose_precision.command import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
