#!/usr/bin/env python3
"""How fast do images reach the model, and is that fast enough? Measured beside timm and torchvision, in turns."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tools.benchmark_data.command import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
