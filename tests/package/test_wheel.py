"""The wheel in a fresh environment, beside other packages named `datasets` and `utils`, and in an empty folder."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tests.documents import tracked_files
from tests.package.test_load import in_program
from tests.program import ROOT
from vitamp import __version__

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
LOSS = """\
from torch.nn import functional as F
from vitamp import loss

@loss
def mine(logits, targets, weight: float = 1.0):
    return weight * F.cross_entropy(logits, targets)
"""
IN_PYTHON = """\
import json, sys
import datasets, utils
import torch, vitamp
from PIL import Image

models = [vitamp.load("run", weights) for weights in ("model", "ema")]
with torch.no_grad():
    logits = [model(transform(Image.open("digit.png"))[None])[0].tolist() for model, transform in models]
strange = [name for name in sys.modules if name.split(".")[0] in ("engine", "models", "tools", "utils", "datasets")]
print(json.dumps({"logits": logits, "modules": strange, "whose": [datasets.WHOSE, utils.WHOSE]}))
"""


def run(*words: object, cwd: Path, **env: str) -> str:
    """The output of a command that must succeed."""
    command = [str(word) for word in words]
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        command, cwd=cwd, env={**kept, **env}, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, f"{command}\n{done.stdout[-3000:]}{done.stderr[-3000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of a copy of the project's files, by way of its source distribution."""
    place = tmp_path_factory.mktemp("built")
    clone = place / "clone"
    for name in tracked_files():
        (clone / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, clone / name)
    build = f"from setuptools.build_meta import build_sdist; print(build_sdist({str(place)!r}))"
    source = run(sys.executable, "-c", build, cwd=clone).splitlines()[-1]
    pip = (sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index", "-w", place)
    run(*pip, place / source, cwd=place)
    assert not (clone / "build").exists()
    return next(place.glob("*.whl"))


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fresh environment with the wheel; torch and the others are those of this environment."""
    place = tmp_path_factory.mktemp("environment") / "env"
    venv.create(place, symlinks=True)
    packages = next(place.glob("lib/python*/site-packages"))
    (packages / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    for name in ("datasets", "utils"):
        (packages / name).mkdir()
        (packages / name / "__init__.py").write_text("WHOSE = 'of another project'\n")
    pip = (sys.executable, "-m", "pip", "--python", place / "bin" / "python")
    run(*pip, "install", "--no-deps", "--no-index", wheel, cwd=place)
    return place


def test_wheel_holds_the_program_in_a_folder_of_its_own(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as file:
        names = file.namelist()
        info = f"vitamp-{__version__}.dist-info"
        metadata = file.read(f"{info}/METADATA").decode()
    assert {name.partition("/")[0] for name in names} == {"vitamp", info}
    packed = {name.removeprefix("vitamp/program/") for name in names if name.startswith("vitamp/program/")}
    left_out = ("tests/", "docs/results/", "bench/", "scripts/kubernetes/", "vitamp/", "setup.py")
    kinds = (".py", ".yaml", ".html", ".md", ".json")
    expected = {name for name in tracked_files() if name.endswith(kinds) and not name.startswith(left_out)}
    assert sorted(expected - packed) == []
    assert sorted(name for name in packed if name.startswith(left_out)) == []
    assert "Requires-Dist: torch>=" in metadata
    assert 'Requires-Dist: onnx>=1.18; extra == "extra"' in metadata


def test_digits_train_in_an_empty_folder_and_others_keep_their_names(environment: Path, tmp_path: Path) -> None:
    command, python = environment / "bin" / "vitamp", environment / "bin" / "python"
    package = next(environment.glob("lib/python*/site-packages/vitamp"))
    before = {path for path in package.rglob("*") if "__pycache__" not in str(path)}
    (tmp_path / "mine.py").write_text(LOSS)
    digits = ("-cfg", "vit_digits", "-amp", "-device", "cpu", "TRAIN.MAX_UPDATES=44")
    said = run(command, "train", *digits, "-output", "run", "-use", "mine.py", "TRAIN.LOSS=mine", cwd=tmp_path)
    log = (tmp_path / "run" / "log.txt").read_text(encoding="utf-8")
    assert f"-cfg vit_digits: {package}/program/configs/vit_digits.yaml, a recipe that comes with vitamp" in log
    assert "Own code: mine.py (loss mine)" in said
    assert "vitamp evaluate run -trust" in said
    assert "vitamp train -resume run" in said
    assert "scripts/" not in said.replace(str(package), "")
    about = json.loads((tmp_path / "run" / "run.json").read_text(encoding="utf-8"))
    assert about["command"].startswith("vitamp train -cfg vit_digits -amp")
    assert (about["versions"]["vitamp"], about["git"]) == (__version__, None)

    Image.fromarray(np.random.default_rng(0).integers(0, 256, (8, 8), dtype=np.uint8)).save(tmp_path / "digit.png")
    assert "digit.png" in run(command, "predict", "run", "digit.png", cwd=tmp_path)
    assert run(command, "predict", "-h", cwd=tmp_path).startswith("usage: vitamp predict ")
    found = json.loads(run(python, "-c", IN_PYTHON, cwd=tmp_path))
    assert found["whose"] == ["of another project"] * 2
    assert sorted(found["modules"]) == ["datasets", "utils"]
    for weights, logits in zip(("model", "ema"), found["logits"], strict=True):
        expected = in_program(tmp_path / "run", tmp_path / "digit.png", weights)[0]
        assert torch.allclose(torch.tensor(logits), expected, rtol=0, atol=1e-6)
    assert {path for path in package.rglob("*") if "__pycache__" not in str(path)} == before


def test_several_processes_train_by_the_command_and_by_torchrun(environment: Path, tmp_path: Path) -> None:
    words = ("multi", "-cfg", "vit_digits", "-device", "cpu", "-amp", "TRAIN.MAX_UPDATES=2")
    said = run(environment / "bin" / "vitamp", *words, "-ngpus", 2, "-output", "own", cwd=tmp_path)
    assert "vitamp multi -ngpus 2 -resume own" in said
    torchrun = (environment / "bin" / "python", "-m", "torch.distributed.run", "--nproc_per_node", 2, "-m", "vitamp")
    said = run(*torchrun, *words, "-output", "torchrun", cwd=tmp_path, OMP_NUM_THREADS="1")
    assert "vitamp multi -resume torchrun TRAIN.MAX_UPDATES=4  # start its 2 processes by torchrun" in said
