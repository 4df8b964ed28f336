"""scripts/setup.sh makes an environment; scripts/quickstart.sh trains, reports and passes on signals and exit codes."""

import os
import pty
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest

from tests.program import ROOT

UV = """\
#!/usr/bin/env bash
# A fake uv: records its arguments and lets venv and pip do the work.
echo "$*" >>"$UV_LOG"
case "$1" in
venv) exec python3 -m venv "${@: -1}" ;;
pip) exec "$4" -m pip install --no-input -r "$6" ;;
esac
"""
OLD_PYTHON = """\
#!/usr/bin/env bash
# Says that it is Python 3.10.
if [[ $1 == --version ]]; then
    echo Python 3.10.9
else
    exec REAL -c "import sys; sys.version_info = (3, 10, 9); $2"
fi
"""
SOURCED = 'source scripts/setup.sh small.txt; echo "PYTHON=$PYTHON"; "$PYTHON" -c "import small; print(small.__file__)"'


def wheel(folder: Path, name: str) -> str:
    """A wheel with one empty module, so that pip needs no network."""
    path = folder / f"{name}-1.0-py3-none-any.whl"
    info = f"{name}-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as file:
        file.writestr(f"{name}.py", "")
        file.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        file.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        file.writestr(f"{info}/RECORD", f"{name}.py,,\n{info}/METADATA,,\n{info}/WHEEL,,\n{info}/RECORD,,\n")
    return str(path)


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A copy with setup.sh and a small requirements file alone, and a folder of programs for PATH without uv."""
    root = tmp_path / "a clone"
    (root / "scripts").mkdir(parents=True)
    shutil.copy(ROOT / "scripts" / "setup.sh", root / "scripts")
    (root / "small.txt").write_text(f"{wheel(tmp_path, 'small')}\n", encoding="utf-8")
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("bash", "cat", "dirname", "mktemp", "rm", "sed"):
        (programs / name).symlink_to(str(shutil.which(name)))
    (programs / "python3").symlink_to(Path(sys.base_prefix) / "bin" / "python3")
    return root


def setup(clone: Path, script: str = SOURCED, code: int = 0, **env: str) -> subprocess.CompletedProcess[str]:
    """It must end with this exit code."""
    kept = {name: value for name, value in os.environ.items() if name not in ("VIRTUAL_ENV", "CONDA_PREFIX")}
    env = {**kept, "PATH": str(clone.parent / "bin"), "UV_LOG": str(clone.parent / "uv.log"), **env}
    words = ["bash", "-euo", "pipefail", "-c", script]
    done = subprocess.run(words, cwd=clone, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == code, done.stderr
    return done


@pytest.mark.slow
@pytest.mark.parametrize("with_uv", [False, True], ids=["venv and pip", "uv"])
def test_environment_is_made_and_filled_once(clone: Path, with_uv: bool) -> None:
    log = clone.parent / "uv.log"
    if with_uv:
        (clone.parent / "bin" / "uv").write_text(UV, encoding="utf-8")
        (clone.parent / "bin" / "uv").chmod(0o755)
    first = setup(clone)
    python = clone / ".venv" / "bin" / "python"
    created, installing, chosen, imported = first.stdout.splitlines()
    assert created == f"setup: creating {clone}/.venv"
    assert installing.startswith(f"setup: installing small.txt into {clone}/.venv (")
    assert chosen == f"PYTHON={python}"
    assert Path(imported).is_relative_to(clone / ".venv")
    assert log.exists() == with_uv
    if with_uv:
        assert log.read_text().splitlines() == [
            f"venv --seed --clear --python >=3.11 {clone}/.venv",
            f"pip install --python {python} -r {clone}/small.txt",
        ]

    again = setup(clone)
    assert again.stdout.splitlines() == [chosen, imported], "nothing is installed twice"
    with (clone / "small.txt").open("a", encoding="utf-8") as file:
        file.write(f"{wheel(clone.parent, 'other')}\n")
    changed = setup(clone, f"{SOURCED}; \"$PYTHON\" -c 'import other'")
    assert "setup: installing small.txt" in changed.stdout
    assert "setup: creating" not in changed.stdout


@pytest.mark.slow
def test_failed_installation_shows_why_and_is_repeated(clone: Path) -> None:
    right = (clone / "small.txt").read_text(encoding="utf-8")
    (clone / "small.txt").write_text(f"{right}{clone.parent}/gone-1.0-py3-none-any.whl\n", encoding="utf-8")
    failed = setup(clone, code=2)
    assert "gone-1.0-py3-none-any.whl" in failed.stderr
    assert failed.stderr.splitlines()[-1] == "setup: installing small.txt failed; see the reason above."
    (clone / "small.txt").write_text(right, encoding="utf-8")
    setup(clone)


def test_too_old_a_python_is_refused(clone: Path) -> None:
    (clone.parent / "bin" / "python3").unlink()
    (clone.parent / "bin" / "python3").write_text(OLD_PYTHON.replace("REAL", sys.executable))
    (clone.parent / "bin" / "python3").chmod(0o755)
    (clone.parent / "bin" / "env").symlink_to(str(shutil.which("env")))
    done = setup(clone, code=2)
    assert "Python 3.11 or newer is needed; this machine has Python 3.10.9." in done.stderr
    assert "https://docs.astral.sh/uv" in done.stderr
    assert not (clone / ".venv").exists()
    active = clone.parent / "old"
    (active / "bin").mkdir(parents=True)
    (active / "bin" / "python").symlink_to(clone.parent / "bin" / "python3")
    done = setup(clone, code=2, VIRTUAL_ENV=str(active))
    assert f"the active environment {active} has no Python 3.11 or newer" in done.stderr


# quickstart.sh


STAND_IN = """\
#!/usr/bin/env bash
# Replaces Python in these tests: prints its arguments and trains nothing.
if [[ $1 == */report.py ]]; then
    echo "report of ${*:2}"
    exit "${REPORT_CODE:-0}"
fi
for name in INT TERM USR1; do trap "echo heard $name; exit 143" "$name"; done
echo "training with ${*:2}"
if [[ -t 1 ]]; then echo "on a terminal"; fi
if [[ -n ${WAIT:-} ]]; then
    for _ in {1..600}; do sleep 0.05; done
fi
echo "$RUN" >"$VITAMP_FOLDER_FILE"
exit "${TRAIN_CODE:-0}"
"""


@pytest.fixture
def house(tmp_path: Path) -> Path:
    """The script with a setup.sh that installs nothing, and the folder of a run."""
    scripts = tmp_path / "a house" / "scripts"
    scripts.mkdir(parents=True)
    shutil.copy(ROOT / "scripts" / "quickstart.sh", scripts)
    (scripts / "setup.sh").write_text(f'ROOT="{scripts.parent}"\nPYTHON="${{INTERPRETER:-$ROOT/python}}"\n')
    (scripts.parent / "python").write_text(STAND_IN)
    (scripts.parent / "python").chmod(0o755)
    (tmp_path / "the run").mkdir()
    return scripts.parent


def start(house: Path, *words: str, out: Any = subprocess.PIPE, **env: str) -> subprocess.Popen[str]:
    command = ["bash", str(house / "scripts" / "quickstart.sh"), *words]
    env = {**os.environ, "RUN": str(house.parent / "the run"), "TMPDIR": str(house.parent), **env}
    return subprocess.Popen(command, env=env, text=True, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)


def test_quickstart_ends_with_the_report(house: Path) -> None:
    done = start(house, "-output", "some where", "TRAIN.NUM_EPOCHS=5")
    told = done.communicate(timeout=60)[0].splitlines()
    assert done.returncode == 0
    assert told[0] == "training with -cfg configs/vit_digits.yaml -amp -output some where TRAIN.NUM_EPOCHS=5"
    assert told[-1] == f"report of {house.parent / 'the run'}"
    assert not list(house.parent.glob("tmp.*")), "no temporary file is left"
    assert "on a terminal" not in told


def test_quickstart_trains_on_the_terminal_itself(house: Path) -> None:
    """Through a pipe, it would show lines for a file, and no bar."""
    ours, theirs = pty.openpty()
    done = start(house, out=theirs)
    assert done.wait(timeout=60) == 0
    told = os.read(ours, 65536).decode()
    os.close(theirs)
    os.close(ours)
    assert "on a terminal" in told
    assert "report of" in told


def test_quickstart_says_how_to_activate_its_own_environment(house: Path) -> None:
    own = house / ".venv" / "bin" / "python"
    own.parent.mkdir(parents=True)
    shutil.copy(house / "python", own)
    reminder = f"activate the environment: source {own.parent}/activate"
    for active, reminded in (("", True), (str(house / ".venv"), False)):
        done = start(house, INTERPRETER=str(own), VIRTUAL_ENV=active)
        told = done.communicate(timeout=60)[0].splitlines()
        assert done.returncode == 0
        assert told[-1].endswith(reminder) == reminded


@pytest.mark.parametrize(
    ("env", "code", "reported"),
    [({"TRAIN_CODE": "1"}, 1, False), ({"RUN": "nowhere"}, 0, False), ({"REPORT_CODE": "2"}, 0, True)],
    ids=["training failed", "nothing was written", "the report failed"],
)
def test_exit_code_is_that_of_the_training(house: Path, env: dict[str, str], code: int, reported: bool) -> None:
    done = start(house, **env)
    told = done.communicate(timeout=60)[0]
    assert done.returncode == code
    assert ("report of" in told) == reported
    assert ("the report could not be written" in told) == ("REPORT_CODE" in env)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
@pytest.mark.parametrize("how", ["to the script", "to its group, as a terminal does", "on a busy machine"])
def test_signals_reach_the_training(house: Path, number: signal.Signals, how: str) -> None:
    if how == "on a busy machine":  # the script may be slow between starting the training and its next line
        file, wait = house / "scripts" / "quickstart.sh", "for ((i = 0; i < 300000; i++)); do :; done"
        text = file.read_text()
        assert text.count("\ntraining=$!\n") == 1
        file.write_text(text.replace("\ntraining=$!\n", f"\n{wait}\ntraining=$!\n"))
    script = start(house, WAIT="yes")
    assert script.stdout is not None
    assert script.stdout.readline().startswith("training with")
    began = time.monotonic()
    (os.killpg if "group" in how else os.kill)(script.pid, number)
    told = script.communicate(timeout=60)[0]
    assert f"heard {number.name.removeprefix('SIG')}" in told
    assert script.returncode == 143
    assert "report of" not in told
    assert time.monotonic() - began < 20, "at once, not at the end of training"


def test_slurm_job_resumes_as_told_until_its_folder_has_checkpoints(tmp_path: Path) -> None:
    env = {**os.environ, "SLURM_SUBMIT_DIR": str(tmp_path), "BASH_FUNC_srun%%": '() { echo "$*"; }'}
    job = ["bash", str(ROOT / "scripts" / "slurm" / "train.sbatch"), "-output", "a run"]
    for number, own in enumerate(("", " -resume b", " MODEL.RESUME=b", " -resume b", " MODEL.RESUME=b")):
        if number == 3:
            (tmp_path / "a run" / "checkpoints" / "step-000000001").mkdir(parents=True)
        done = subprocess.run([*job, *own.split()], env=env, stdout=subprocess.PIPE, text=True, check=True)
        added = "" if number in (1, 2) else " MODEL.RESUME=auto"
        assert done.stdout.endswith(f" -output a run{own}{added}\n")
