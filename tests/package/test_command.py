"""The command `vitamp`, started as `python -m vitamp` in the clone; and texts in the words of an installed program."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.program import ROOT
from utils import program
from utils.distributed.world import ALONE
from utils.program import help_here
from vitamp import __version__

MAIN = ("main_single_gpu.py", "main_multi_gpu.py")
SCRIPTS = sorted(file.stem for file in (ROOT / "scripts").glob("*.py"))


def start(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "vitamp", *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)


def test_commands_are_listed_with_a_line_each() -> None:
    done = start()
    assert (done.returncode, done.stderr) == (0, "")
    assert start("-h").stdout == start("--help").stdout == done.stdout
    listed = done.stdout.split("commands:\n")[1].split("\n\n")[0].splitlines()
    assert [line.split()[0] for line in listed] == ["train", "multi", *SCRIPTS]
    assert [line for line in done.stdout.splitlines() if len(line) > 100 and str(ROOT) not in line] == []
    assert all(len(line.split()) > 3 for line in listed)
    assert str(ROOT / "docs") in done.stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["predcit"], "unknown command 'predcit'. Did you mean predict? vitamp -h lists the commands."),
        (["evaluate.py"], "unknown command 'evaluate.py'. Did you mean evaluate?"),
        (["-cfg", "vit_digits"], "the command is missing before '-cfg'. Did you mean vitamp train -cfg?"),
        (["xyz"], "unknown command 'xyz'. vitamp -h"),
    ],
)
def test_unknown_commands_are_refused_with_the_closest(words: list[str], said: str) -> None:
    done = start(*words)
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr


def test_commands_take_the_flags_of_their_scripts() -> None:
    shown = rf"vitamp {re.escape(__version__)}\ntorch 2\.\S+\ntimm 1\.\S+\n"
    assert re.fullmatch(shown, start("--version").stdout)
    assert start("train", "-h").stdout.startswith("usage: python main_single_gpu.py ")
    missing = start("predict")
    assert missing.returncode == 2
    assert "RUN" in missing.stderr


def test_a_bench_needs_a_checkout(tmp_path: Path) -> None:
    """The installed package has its script without `bench/`."""
    name = "benchmark_amp"
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts")
    command = [sys.executable, str(tmp_path / "scripts" / f"{name}.py"), "-h"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"error: {name} is not in the installed package; it needs a checkout of vitamp.\n"
    (listed,) = (line for line in start().stdout.splitlines() if line.startswith(f"  {name} "))
    assert listed.endswith("; needs a checkout.")


def test_help_names_the_commands_of_an_installed_program() -> None:
    text = "-use FILE.py,mine.py: python scripts/report.py RUN, that evaluate.py -calibrate fitted"
    assert help_here(text) == text
    assert help_here(text, installed=True) == (
        "-use FILE.py,mine.py: vitamp report RUN, that vitamp evaluate -calibrate fitted"
    )


def test_next_commands_are_those_of_an_installed_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "INSTALLED", True)
    monkeypatch.setattr(sys, "argv", ["/somewhere/vitamp/program/main_single_gpu.py"])
    assert program.tool("evaluate") == "vitamp evaluate"
    assert program.start_again(ALONE, "-resume runs/a") == "vitamp train -resume runs/a"


@pytest.mark.parametrize("script", [*MAIN, *(f"scripts/{name}.py" for name in SCRIPTS)])
def test_python_without_packages_gets_one_line(script: str, tmp_path: Path) -> None:
    bare = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-S", str(ROOT / script), "-h"]
    done = subprocess.run(command, cwd=tmp_path, env=bare, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"error: {sys.executable} lacks torch, torchvision, timm, ")
    assert re.search(r"(activate the environment: source|to install, run: bash) \S+", line)
