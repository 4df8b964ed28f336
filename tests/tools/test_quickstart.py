"""scripts/quickstart.sh trains, writes the report, and passes on signals and the exit code of the training."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.program import ROOT

STAND_IN = """\
#!/usr/bin/env bash
# Stands in for Python: prints its arguments and trains nothing.
if [[ $1 == */report.py ]]; then
    echo "report of ${*:2}"
    exit "${REPORT_CODE:-0}"
fi
for name in INT TERM USR1; do trap "echo heard $name; exit 143" "$name"; done
echo "training with ${*:2}"
if [[ -n ${WAIT:-} ]]; then
    for _ in {1..600}; do sleep 0.05; done
fi
echo "Done: best top-1 99 %; everything is in $RUN"
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


def start(house: Path, *words: str, **env: str) -> subprocess.Popen[str]:
    command = ["bash", str(house / "scripts" / "quickstart.sh"), *words]
    env = {**os.environ, "RUN": str(house.parent / "the run"), "TMPDIR": str(house.parent), **env}
    return subprocess.Popen(
        command,
        env=env,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def test_quickstart_ends_with_the_report(house: Path) -> None:
    done = start(house, "-output", "some where", "TRAIN.NUM_EPOCHS=5")
    told = done.communicate(timeout=60)[0].splitlines()
    assert done.returncode == 0
    assert told[0] == "training with -cfg configs/vit_digits.yaml -amp -output some where TRAIN.NUM_EPOCHS=5"
    assert told[-1] == f"report of {house.parent / 'the run'}"
    assert not list(house.parent.glob("tmp.*")), "no temporary file is left"


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
