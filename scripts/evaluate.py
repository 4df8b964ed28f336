#!/usr/bin/env python3
"""How good is a trained model? More than its accuracy, on its own validation part or on any other data."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tools.evaluate.command import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
