#!/usr/bin/env python3
"""Benchmark mixed precision and vitamp's update on this machine."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tools.benchmark_amp.command import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
