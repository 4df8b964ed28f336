#!/usr/bin/env python3
"""Pack images into a few tar files, which load several times faster."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tools.pack_images.command import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
