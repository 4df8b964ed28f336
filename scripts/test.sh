#!/usr/bin/env bash
# Installs what is missing, then checks style, types and behaviour. Stops at the first stage that fails.
#
#   bash scripts/test.sh                          # all but the slow tests
#   bash scripts/test.sh --slice 3                # those and slice 3 of the slow ones, as CI runs them
#   bash scripts/test.sh --all                    # all; writes their durations to docs/results/tests.json
#   bash scripts/test.sh tests/test_recipes.py    # arguments go to pytest
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh" requirements-dev.txt
cd "$ROOT"

stage() {
    echo "== $1"
    shift
    "$PYTHON" -m "$@" </dev/null
}

stage 'ruff check' ruff check .
stage 'ruff format' ruff format --check .
stage 'pyright' pyright --pythonpath "$PYTHON"
if (($# == 0)); then
    set -- -m 'not slow'
fi
# The tests start hundreds of processes; without its bytecode, each would compile the project again.
unset PYTHONDONTWRITEBYTECODE
# Two workers, each with one thread: more threads than cores make small models slower, not faster.
OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" stage 'pytest' pytest -n 2 --dist worksteal "$@"
