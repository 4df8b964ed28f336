#!/usr/bin/env python3
"""Find images whose label is probably wrong, by models that did not see the image."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tools.check_labels.command import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
