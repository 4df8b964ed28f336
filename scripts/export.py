#!/usr/bin/env python3
"""Export a trained model to ONNX, torch.export, safetensors or the Hub."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tools.export.command import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
