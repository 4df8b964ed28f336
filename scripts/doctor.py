#!/usr/bin/env python3
"""Former name of choose_precision.py: the same program; its files keep their names, doctor.json and doctor.png."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tools.choose_precision.command import FORMER_NAME, main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], FORMER_NAME))
