#!/usr/bin/env python3
"""Turn PaddleViT's weights into safetensors, as export does with a .pdparams file."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tools.export.command import main as export


def main(argv: list[str]) -> int:
    return export([*argv, "-to", "safetensors"])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
