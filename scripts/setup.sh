# Sourced by the scripts that need a Python environment:
#
#   source scripts/setup.sh requirements.txt
#
# Sets ROOT, the project's folder, and PYTHON, an interpreter with everything in that file installed: that of the active
# environment, or of $ROOT/.venv, which is created if missing.

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"

fail() {
    printf 'setup: %s\n' "$@" >&2
    exit 2
}

is_new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; }

# Prints the first Python that is new enough.
find_python() {
    local name
    for name in python3 python3.14 python3.13 python3.12 python3.11 python; do
        if is_new_enough "$name"; then
            command -v "$name"
            return
        fi
    done
    fail "Python 3.11 or newer is needed; this machine has $(python3 --version 2>/dev/null || echo 'no python3')." \
        "Install one, or install uv (https://docs.astral.sh/uv), which brings its own."
}

# Runs a command and shows its output only if it fails.
quietly() {
    local log
    log="$(mktemp)"
    if "$@" </dev/null >"$log" 2>&1; then
        rm -f "$log"
    else
        cat "$log" >&2
        rm -f "$log"
        return 1
    fi
}

make_environment() {
    local python
    echo "setup: creating $ROOT/.venv"
    if command -v uv >/dev/null; then
        quietly uv venv --seed --clear --python '>=3.11' "$ROOT/.venv"
    else
        python="$(find_python)" || exit
        "$python" -c 'import ensurepip, venv' 2>/dev/null ||
            fail "$python cannot create virtual environments." "On Debian and Ubuntu: apt install python3-venv"
        quietly "$python" -m venv --clear "$ROOT/.venv"
    fi || fail "could not create $ROOT/.venv; see the reason above."
}

# Sets PYTHON. conda's `base` is not used: on many machines it is active without anyone having chosen it.
choose_environment() {
    local active="${VIRTUAL_ENV:-}"
    if [[ -z $active && -n ${CONDA_PREFIX:-} && ${CONDA_DEFAULT_ENV:-base} != base ]]; then
        active="$CONDA_PREFIX"
    fi
    PYTHON="${active:-$ROOT/.venv}/bin/python"
    if [[ -n $active ]]; then
        is_new_enough "$PYTHON" || fail "the active environment $active has no Python 3.11 or newer." \
            "Deactivate it, and setup creates one in $ROOT/.venv."
    elif ! is_new_enough "$PYTHON"; then
        make_environment
    fi
}

# Prints a requirements file's name and those of the files it includes.
with_includes() {
    echo "$1"
    sed -n 's/^-r *//p' "$ROOT/$1"
}

# Content of an environment's stamp file once everything in a requirements file is installed.
stamp_of() {
    local name
    "$PYTHON" --version
    for name in $(with_includes "$1"); do cat "$ROOT/$name"; done
}

install() {
    local name
    echo "setup: installing $1 into ${PYTHON%/bin/python} (the first time: some GB, 1 to 10 minutes)"
    if command -v uv >/dev/null; then
        quietly uv pip install --python "$PYTHON" -r "$ROOT/$1"
    else
        quietly "$PYTHON" -m pip install --no-input --progress-bar off -r "$ROOT/$1"
    fi || fail "installing $1 failed; see the reason above."
    for name in $(with_includes "$1"); do stamp_of "$name" >"$STAMPS-$name"; done
}

choose_environment
# The stamp files are in the environment, so a new environment has none.
STAMPS="${PYTHON%/bin/python}/.vitamp"
[[ "$(cat "$STAMPS-$1" 2>/dev/null)" == "$(stamp_of "$1")" ]] || install "$1"
