#!/usr/bin/env python3
"""What mixed precision and this program's update are worth on this machine: one command a table."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tools.benchmark_amp.command import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
