#!/usr/bin/env python3
"""Evaluate a trained model: accuracy, recall, calibration, confusion."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tools.evaluate.command import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
