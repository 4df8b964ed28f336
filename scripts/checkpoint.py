#!/usr/bin/env python3
"""List, verify, average and strip checkpoints."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tools.checkpoint.command import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
