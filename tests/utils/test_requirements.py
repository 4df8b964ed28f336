"""What is imported is asked for: a package that only comes along with another one may be gone with its next release."""

import ast
import os
import re
import subprocess
import sys
from importlib.metadata import Distribution, distribution, packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.program import ROOT

ROOMS = ("utils", "models", "datasets", "engine", "tools", "scripts", "bench", "vitamp")


def imported() -> dict[str, str]:
    """Top names of all that is imported from elsewhere -> a file that does, if possible not in bench."""
    found: dict[str, str] = {}
    paths = [*ROOT.glob("main_*.py"), *(path for room in ROOMS for path in (ROOT / room).rglob("*.py"))]
    for path in sorted(paths, key=lambda path: path.relative_to(ROOT).parts[0] != "bench"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and not node.level:
                names = [node.module or ""]
            found |= {name.partition(".")[0]: str(path.relative_to(ROOT)) for name in names}
    ours = {*sys.stdlib_module_names, *ROOMS, "start", *(path.stem for path in ROOT.glob("main_*.py"))}
    return {name: file for name, file in found.items() if name not in ours}


def asked_for(*names: str) -> set[str]:
    lines = [line for name in names for line in (ROOT / name).read_text(encoding="utf-8").splitlines()]
    return {word[0].lower().replace("_", "-") for line in lines if (word := re.match(r"[A-Za-z0-9_.-]+", line))}


def test_every_package_that_is_imported_is_in_the_requirements() -> None:
    distributions = packages_distributions()
    found = imported()
    assert "torch" in found
    users = asked_for("requirements.txt", "requirements-extra.txt")
    maintainers = users | asked_for("requirements-dev.txt")
    missing = {
        f"{name} ({file})"
        for name, file in found.items()
        if not (maintainers if file.startswith("bench/") else users)
        & {dist.lower().replace("_", "-") for dist in distributions.get(name, [name])}
    }
    assert not missing


def needed_by(names: set[str]) -> dict[str, Distribution]:
    """Installed packages of these names, and those that they need in turn, without extras."""
    found: dict[str, Distribution] = {}
    waiting = sorted(names)
    while waiting:
        name = waiting.pop().lower().replace("_", "-")
        if name in found:
            continue
        found[name] = distribution(name)
        needed = map(Requirement, found[name].requires or ())
        waiting += [one.name for one in needed if one.marker is None or one.marker.evaluate({"extra": ""})]
    return found


@pytest.mark.slow
def test_requirements_alone_train_the_digits_with_amp(tmp_path: Path) -> None:
    """With the packages of requirements.txt and those that they need, and no others of this environment."""
    packages = tmp_path / "packages"
    packages.mkdir()
    for installed in needed_by(asked_for("requirements.txt")).values():
        for top in {file.parts[0] for file in installed.files or ()}:
            link, place = packages / top, Path(str(installed.locate_file(top)))
            if top not in ("..", "__pycache__") and not top.endswith(".pth") and not link.exists():
                link.symlink_to(place)
    env = {**os.environ, "PYTHONPATH": str(packages)}
    # -S: without site, so that the environment's own folder of packages is not searched.
    absent = "import importlib.util as i, sys; sys.exit(any(map(i.find_spec, ['pytest', 'onnx', 'torchao', 'wandb'])))"
    subprocess.run([sys.executable, "-S", "-c", absent], env=env, check=True, timeout=60)
    words = ("main_single_gpu.py", "-cfg", "configs/vit_digits.yaml", "-amp", "-device", "cpu", "TRAIN.NUM_EPOCHS=1")
    command = [sys.executable, "-S", *words, "-output", str(tmp_path / "run")]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Done: best top-1" in done.stdout
