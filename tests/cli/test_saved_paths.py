"""A run saves absolute paths, so that its tools find the same files from every folder; and data may move."""

import json
import shutil
from pathlib import Path

import pytest
import yaml

from tests.program import Vitamp, change_settings, run_program, save_image

RECIPE = """\
DATA: {DATASET: imagefolder, DATA_PATH: own, IMAGE_SIZE: 8, BATCH_SIZE: 8, NUM_WORKERS: 0, EXCLUDE: ./lists/none.txt}
MODEL: {NAME: tiny, NUM_CLASSES: 3, PATCH_SIZE: 4, EMBED_DIM: 16, DEPTH: 1, NUM_HEADS: 2}
TRAIN: {NUM_EPOCHS: 1, WARMUP_EPOCHS: 0, LOSS: mine}
USE: [mine.py]
THREADS: 1
DEVICE: cpu
"""
OWN = "from vitamp import loss\n@loss\ndef mine(logits, targets):\n    return logits.square().mean()\n"


@pytest.fixture(scope="module")
def project(place: Path) -> Path:
    """A folder with data, lists, code and a run that was given relative paths."""
    for name in "abc":
        for number in range(8):
            save_image(place / "own" / name / f"{number}.jpg", seed=ord(name) * 100 + number, size=(12, 12))
    (place / "lists").mkdir()
    (place / "lists" / "none.txt").write_text("# nothing\n")
    (place / "mine.py").write_text(OWN)
    (place / "own.yaml").write_text(RECIPE)
    run_program("-cfg", "own.yaml", "-output", "run", cwd=place, streams=place, code=0)
    return place


def saved_paths(run: Path) -> list[object]:
    config = yaml.safe_load((run / "config.yaml").read_text())
    saved = json.loads(max(run.glob("checkpoints/step-*/meta.json")).read_text())["settings"]
    paths = [config["DATA"]["DATA_PATH"], config["DATA"]["EXCLUDE"], config["USE"]]
    assert paths == [saved["DATA.DATA_PATH"], saved["DATA.EXCLUDE"], saved["USE"]]
    return paths


def test_a_run_saves_absolute_paths(project: Path, vitamp: Vitamp, tmp_path: Path) -> None:
    run, own, lists = project / "run", f"{project / 'own'}", f"{project / 'lists' / 'none.txt'}"
    assert saved_paths(run) == [own, lists, [f"{project / 'mine.py'}"]]
    done = vitamp(run, "-trust", script="scripts/evaluate.py", cwd=tmp_path, code=0)
    assert f"imagefolder in {own}, validation split" in done.text
    again = ("-resume", "run", "TRAIN.NUM_EPOCHS=2", "-use", "mine.py", "-output", tmp_path / "longer")
    done = vitamp(*again, "-data_path", "own", cwd=project, code=0)
    assert "changed since: TRAIN.NUM_EPOCHS" in done.text
    assert "changed since: DATA" not in done.text
    assert "changed since: USE" not in done.text


def test_relative_paths_of_an_earlier_version_begin_where_the_run_started(
    project: Path, vitamp: Vitamp, tmp_path: Path
) -> None:
    run = shutil.copytree(project / "run", tmp_path / "run")
    change_settings(run, {"DATA.DATA_PATH": "own", "DATA.EXCLUDE": "lists/none.txt", "USE": ["mine.py"]})
    config = (run / "config.yaml").read_text().replace(f"{project}/", "")
    (run / "config.yaml").write_text(config)
    (tmp_path / "own").mkdir()  # another folder of that name
    for words, script in (
        ((run, "-trust"), "scripts/evaluate.py"),
        ((run, "-trust"), "scripts/report.py"),
        (("-resume", run, "TRAIN.NUM_EPOCHS=2", "-trust"), "main_single_gpu.py"),
    ):
        vitamp(*words, script=script, cwd=tmp_path, code=0)
    assert saved_paths(run)[:2] == [f"{project / 'own'}", f"{project / 'lists' / 'none.txt'}"]


def test_a_report_without_images_is_an_error_and_replaces_no_page(
    project: Path, vitamp: Vitamp, tmp_path: Path
) -> None:
    run = shutil.copytree(project / "run", tmp_path / "run")
    moved, page, report = tmp_path / "moved", run / "report.html", "scripts/report.py"
    change_settings(run, {"DATA.DATA_PATH": f"{tmp_path / 'gone'}"})
    done = vitamp(run, "-trust", script=report, code=2)
    assert f"-data_path): {tmp_path / 'gone'} does not exist." in done.err
    assert "lacks its predictions. -data_path names moved images; for others, use evaluate.py" in done.err
    assert "could not be evaluated" in page.read_text()
    shutil.copytree(project / "own", moved)
    vitamp(run, "-trust", "-data_path", moved, script=report, code=0)
    good = page.read_text()
    assert "could not be evaluated" not in good
    assert f"{page} stays as it is." in vitamp(run, "-trust", script=report, code=2).err
    done = vitamp(run, "-trust", "-data_path", moved / "a", script=report, code=2)
    assert page.read_text() == good
    (moved / "a" / "0.jpg").unlink()
    done = vitamp(run, "-trust", "-data_path", moved, script=report, code=2)
    assert f"-data_path {moved}: not the images of the run" in done.err
    assert json.loads((run / "run.json").read_text())["folder"] == f"{project}"
