"""A run's folder from someone else: links and pipes in place of its files, and line breaks in its settings."""

import os
import shutil
from pathlib import Path

import pytest

from tests.program import Vitamp

SECONDS = 60
"""Many times what each test takes: a program that waits for a pipe never ends."""
MORE = "TRAIN.NUM_EPOCHS=3"
TWO = ("-ngpus", 2, "-device", "cpu", "-batch_size", 16)


@pytest.fixture
def run(digits_run: Path, tmp_path: Path) -> Path:
    """A copy, to be changed."""
    return Path(shutil.copytree(digits_run, tmp_path / "run"))


def resume(vitamp: Vitamp, run: Path, ranks: int, code: int) -> str:
    script, words = ("main_single_gpu.py", ()) if ranks == 1 else ("main_multi_gpu.py", TWO)
    return vitamp("-resume", run, MORE, *words, script=script, timeout=SECONDS, code=code).text


@pytest.mark.parametrize(
    ("name", "ranks"), [("log.txt", 1), ("ranks/0.log", 1), (".lock", 1), ("ranks", 1), ("ranks/1.log", 2)]
)
def test_link_in_place_of_a_file_is_refused(vitamp: Vitamp, run: Path, tmp_path: Path, name: str, ranks: int) -> None:
    (tmp_path / "theirs").mkdir()
    target = tmp_path / "theirs" / "0.log"
    target.write_text("export A=1\n")
    shutil.rmtree(run / name) if (run / name).is_dir() else (run / name).unlink(missing_ok=True)
    (run / name).symlink_to(target.parent if name == "ranks" else target)
    assert f"{run / name}: cannot be written (it is a link" in resume(vitamp, run, ranks, 2)
    assert target.read_text() == "export A=1\n"


def test_line_breaks_of_settings_are_escaped_in_the_log(vitamp: Vitamp, run: Path) -> None:
    text = (run / "config.yaml").read_text()
    for key in ("TAG", "  CACHE"):
        text = text.replace(f"{key}: null\n", f'{key}: "x\\ncommand\\n#"\n')
    (run / "config.yaml").write_text(text)
    resume(vitamp, run, 1, 0)
    lines = (run / "log.txt").read_text().splitlines()
    assert r"  tag        x\ncommand\n#" in lines
    assert not any(line.startswith("command") for line in lines)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", ["checkpoints/index.json", ".lock"])
def test_pipe_in_place_of_a_file_does_not_hang_a_resume(vitamp: Vitamp, run: Path, name: str, ranks: int) -> None:
    (run / name).unlink()
    os.mkfifo(run / name)
    text = resume(vitamp, run, ranks, 2 if name == ".lock" else 0)
    assert ("everything is in" in text) == (name != ".lock")
    assert ("it is a pipe or device, not a file" in text) == (name == ".lock")


def test_pipes_in_a_checkpoint_are_refused_by_tools(vitamp: Vitamp, run: Path) -> None:
    (run / "checkpoints" / "index.json").unlink()
    os.mkfifo(run / "checkpoints" / "index.json")
    vitamp(run, script="scripts/evaluate.py", timeout=SECONDS, code=0)
    for meta in run.glob("checkpoints/*/meta.json"):
        meta.unlink()
        os.mkfifo(meta)
    done = vitamp(run, script="scripts/evaluate.py", timeout=SECONDS, code=2)
    assert "it is a pipe or device, not a file" in done.err
