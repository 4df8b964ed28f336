#!/usr/bin/env bash
# Installs what is missing, trains a small Vision Transformer on real handwritten digits in mixed precision, and makes
# a page about the run. Nothing is downloaded but packages; two CPU cores are enough.
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

# Where the run's folder is, its last line says: what it tells is seen as it comes, and kept.
told="$(mktemp)"
trap 'rm -f "$told"' EXIT
exec 3> >(trap '' INT TERM USR1 && exec tee "$told")
teller=$!

# In the background, so that a signal to this script reaches the training at once; with `set -m`, or Ctrl-C would not.
set -m
"$PYTHON" "$ROOT/main_single_gpu.py" -cfg "$CONFIG" -amp "$@" >&3 &
training=$!
set +m
for signal in INT TERM USR1; do
    trap "kill -$signal $training 2>/dev/null || true" "$signal"
done
code=0
wait "$training" || code=$?
while kill -0 "$training" 2>/dev/null; do # a signal ended the waiting, not the training
    code=0
    wait "$training" || code=$?
done
exec 3>&-
wait "$teller" || true

run="$(sed -n 's/.*everything is in //p' "$told" | tail -n 1)"
if [[ $code == 0 && -d $run ]]; then
    "$PYTHON" "$ROOT/scripts/report.py" "$run" || echo 'The run is done; only its report could not be made.' >&2
fi
exit "$code"
