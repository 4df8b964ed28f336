#!/usr/bin/env python3
"""Measure how fast images are loaded, compared with timm and torchvision."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tools.benchmark_data.command import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
