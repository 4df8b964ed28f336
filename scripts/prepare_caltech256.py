#!/usr/bin/env python3
"""Former tool: the entry scripts read Caltech-256 themselves."""

import sys

print(
    "error: prepare_caltech256.py was removed; -dataset caltech256 reads the same images without a table:\n"
    "  python main_single_gpu.py -dataset caltech256 -data_path /data -num_classes 256 DATA.DOWNLOAD=true\n"
    "DATA.DOWNLOAD=true downloads them if they are missing. More: docs/recipes/caltech256_resnet50.md",
    file=sys.stderr,
)
sys.exit(2)
