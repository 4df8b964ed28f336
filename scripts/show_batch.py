#!/usr/bin/env python3
"""Draw the first training images of a run as the model sees them."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tools.show_batch.command import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
