#!/usr/bin/env python3
"""What does the model see? The first training images of a run, as a picture, after all that is done to them."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tools.show_batch.command import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
