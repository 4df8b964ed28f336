#!/usr/bin/env python3
"""Check a data set: read every image once, as training does, and report defects."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tools.check_data.command import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
