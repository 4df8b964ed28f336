#!/usr/bin/env python3
"""Write an HTML report of one or several runs: metrics, curves, predictions."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tools.report.command import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
