#!/usr/bin/env python3
"""Convert PaddleViT weights (.pdparams) to a safetensors file for timm and vitamp."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tools.import_paddle.command import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
