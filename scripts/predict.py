#!/usr/bin/env python3
"""Predict the classes of images with a trained model."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tools.predict.command import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
