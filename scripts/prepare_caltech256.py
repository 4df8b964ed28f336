#!/usr/bin/env python3
"""Make a table of Caltech-256 for `-dataset csv`: image_path, target, class_name."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tools.prepare_caltech256.command import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
