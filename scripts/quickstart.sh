#!/usr/bin/env bash
# Installs missing packages, trains a small Vision Transformer on handwritten digits with -amp (mixed precision, where
# the device computes in it), and writes a report of the run. Only packages are downloaded; two CPU cores are enough.
#
#   bash scripts/quickstart.sh
#   bash scripts/quickstart.sh -output my_run TRAIN.NUM_EPOCHS=5     # flags and settings are passed on
#   CONFIG=configs/vit_synthetic.yaml bash scripts/quickstart.sh     # another recipe
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh" requirements.txt

# CONFIG is relative to the current folder; the project's own recipes are found from any folder.
CONFIG="${CONFIG:-configs/vit_digits.yaml}"
if [[ ! -f $CONFIG && -f $ROOT/$CONFIG ]]; then
    CONFIG="$ROOT/$CONFIG"
fi

# The training writes its folder to this file. Its output goes to the terminal itself, which shows a bar only then.
file="$(mktemp)"
trap 'rm -f "$file"' EXIT

# Traps before the training starts: a signal between its start and the traps would end this script alone. `$!` is the
# training from the moment it runs.
forward() {
    [[ -n ${!-} ]] || exit $((128 + $(kill -l "$1")))
    kill "-$1" "$!" 2>/dev/null || true
}
for signal in INT TERM USR1; do
    trap "forward $signal" "$signal"
done

# In the background, so that signals to this script reach the training at once; `set -m`, so that Ctrl-C does too.
set -m
VITAMP_FOLDER_FILE="$file" "$PYTHON" "$ROOT/main_single_gpu.py" -cfg "$CONFIG" -amp "$@" &
training=$!
set +m
code=0
wait "$training" || code=$?
while kill -0 "$training" 2>/dev/null; do # a signal ended `wait`, not the training
    code=0
    wait "$training" || code=$?
done

run="$(<"$file")"
if [[ $code == 0 && -d $run ]]; then
    "$PYTHON" "$ROOT/scripts/report.py" "$run" || echo 'The run is done, but the report could not be written.' >&2
    if [[ $PYTHON == "$ROOT/.venv/bin/python" && ${VIRTUAL_ENV:-} != "$ROOT/.venv" ]]; then
        echo "Before any other command, activate the environment: source $ROOT/.venv/bin/activate"
    fi
fi
exit "$code"
