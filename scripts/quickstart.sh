#!/usr/bin/env bash
# Installs what is missing and trains a small Vision Transformer on real handwritten digits in mixed precision.
# Nothing is downloaded but packages; two CPU cores are enough.
#
#   bash scripts/quickstart.sh
#   bash scripts/quickstart.sh -output my_run TRAIN.NUM_EPOCHS=5     # flags and settings are passed on
#   CONFIG=configs/vit_synthetic.yaml bash scripts/quickstart.sh     # another recipe
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh" requirements.txt

# A CONFIG of the user's is meant from where they stand; the project's own recipes are found from anywhere.
CONFIG="${CONFIG:-configs/vit_digits.yaml}"
if [[ ! -f $CONFIG && -f $ROOT/$CONFIG ]]; then
    CONFIG="$ROOT/$CONFIG"
fi
exec "$PYTHON" "$ROOT/main_single_gpu.py" -cfg "$CONFIG" -amp "$@"
