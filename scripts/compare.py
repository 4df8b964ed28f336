#!/usr/bin/env python3
"""Compare settings, recipes or precisions, over several seeds or folds."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tools.compare.command import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
