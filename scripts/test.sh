#!/usr/bin/env bash
# Installs what is missing, then checks style, types and behaviour. Stops at the first stage that fails.
#
#   bash scripts/test.sh                          # all but the slow tests
#   bash scripts/test.sh --slice 3                # those and slice 3 of the slow ones, as CI runs them
#   bash scripts/test.sh --all                    # all
#   bash scripts/test.sh --gpu                    # those that need a GPU, without ruff and pyright
#   bash scripts/test.sh tests/test_recipes.py    # arguments go to pytest
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh" requirements-dev.txt
cd "$ROOT"

stage() {
    echo "== $1"
    shift
    "$PYTHON" -m "$@" </dev/null
}

# The tests start hundreds of processes; without its bytecode, each would compile the project again.
unset PYTHONDONTWRITEBYTECODE
# A worker per core, each with one thread: more threads than cores make small models slower, not faster. More than eight
# workers gain nothing: the longest tests decide, and each worker has torch in memory.
cores="$("$PYTHON" -c 'from utils.machine.cpus import cores; print(cores())')"
workers=$((cores < 8 ? cores : 8))
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

if [[ ${1:-} == --gpu ]]; then
    # By the clock alone, when no other test keeps the GPU busy. With -k, either part may have no test: pytest exits with 5.
    first=0 second=0
    stage 'pytest, GPU' pytest -n "$workers" --dist worksteal --forbid-skips --timing none "$@" || first=$?
    ((first == 0 || first == 5)) || exit "$first"
    stage 'pytest, GPU, timing' pytest -n 0 --forbid-skips --timing only "$@" || second=$?
    ((second == 5 && first == 0)) || exit "$second"
    exit
fi
stage 'ruff check' ruff check .
stage 'ruff format' ruff format --check .
stage 'pyright' pyright --pythonpath "$PYTHON"
if (($# == 0)); then
    set -- -m 'not slow'
fi
stage 'pytest' pytest -n "$workers" --dist worksteal "$@"
