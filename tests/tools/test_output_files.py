"""Output files of tools: errors are found before the work, and an interrupted tool lists what it wrote."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.program import ROOT, Result, save_image
from tools.common.command_line import run_tool
from tools.common.output_file import check_output_file, writing
from tools.export import command as export
from utils.errors import EXIT_INTERRUPTED, UserError
from utils.log import log

TOOLS = {
    "check_data": ("-dataset", "imagefolder", "-data_path", "{tree}", "-num_classes", "1", "-fix", "{out}.txt"),
    "check_data -json": ("-dataset", "imagefolder", "-data_path", "{tree}", "-num_classes", "1", "-json", "{out}.json"),
    "show_batch": ("-cfg", "configs/vit_digits.yaml", "-out", "{out}.png"),
    "predict": ("{run}", "{tree}", "-out", "{out}.csv"),
    "evaluate": ("{run}", "-json", "{out}.json"),
    "export": ("{run}", "-to", "torch", "-out", "{out}.pt2"),
    "checkpoint": ("strip", "{run}", "-out", "{out}.safetensors"),
    "report": ("{run}", "-out", "{out}.html"),
    "export pdparams": ("{tree}/w.pdparams", "-to", "safetensors", "-out", "{out}.safetensors"),
    "benchmark_amp": ("amp", "-cfg", "configs/vit_digits.yaml", "-json", "{out}.json"),
}


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("tree")
    for part in ("train", "val"):
        save_image(root / part / "one" / f"{part}.png", seed=len(part))
    (root / "w.pdparams").write_bytes(b"\x80")
    return root


@pytest.mark.parametrize("unbuffered", ["", pytest.param("1", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("line", "code"),
    [
        pytest.param("scripts/predict.py {run} {tree}/train", 2, marks=pytest.mark.slow),
        pytest.param("scripts/evaluate.py {run} -device cpu", 2, marks=pytest.mark.slow),
        pytest.param("scripts/checkpoint.py -h", 2, marks=pytest.mark.slow),
        ("main_single_gpu.py -print_config", 1),
    ],
)
def test_full_disk_behind_standard_output_is_one_line(
    digits_run: Path, tree: Path, line: str, code: int, unbuffered: str
) -> None:
    env = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    with open("/dev/full", "w") as full:
        words = [sys.executable, *line.format(run=digits_run, tree=tree).split()]
        done = subprocess.run(words, check=False, stdout=full, stderr=subprocess.PIPE, text=True, env=env, cwd=ROOT)
    assert done.returncode == code, done.stderr
    assert "error: standard output cannot be written (No space left on device)" in done.stderr
    assert done.stderr.count("\n") <= 2, "at most the line about the weights, and the error"


@pytest.mark.parametrize("tool", TOOLS)
def test_unwritable_output_is_refused_before_the_work(
    tool: str, tree: Path, digits_run: Path, tmp_path: Path, vitamp: Callable[..., Result]
) -> None:
    (tmp_path / "file").write_text("")
    places = {
        str(tmp_path / "none" / "x"): f"the folder {tmp_path / 'none'} does not exist",
        str(tmp_path / "file" / "x"): f"{tmp_path / 'file'} is a file, not a folder",
        str(tmp_path / ("x" * 300)): "cannot be written (File name too long)",
    }
    for out, said in places.items():
        words = [word.format(out=out, tree=tree, run=digits_run) for word in TOOLS[tool]]
        done = vitamp(*words, script=f"scripts/{tool.split()[0]}.py")
        assert done.code == 2, done.text
        assert said in done.err
        assert "Traceback" not in done.text
        assert done.out == "", "no work was done"


@pytest.mark.parametrize("tool", TOOLS)
def test_existing_output_is_refused_before_the_work(
    tool: str, tree: Path, digits_run: Path, tmp_path: Path, vitamp: Callable[..., Result]
) -> None:
    words = [word.format(out=tmp_path / "old", tree=tree, run=digits_run) for word in TOOLS[tool]]
    (old,) = (Path(word) for word in words if word.startswith(str(tmp_path)))
    old.write_text("mine")
    done = vitamp(*words, script=f"scripts/{tool.split()[0]}.py")
    assert done.code == 2, done.text
    assert "already exists" in done.err
    assert "-overwrite" in done.err
    assert old.read_text() == "mine"


def test_output_file_accepts_only_regular_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "old").write_text("old")
    (tmp_path / "link").symlink_to("old")
    assert check_output_file(tmp_path / "new", "-out") == tmp_path / "new"
    assert check_output_file(Path("~/new"), "-out") == tmp_path / "new"
    assert check_output_file(tmp_path / "link", "-out") == tmp_path / "link"
    assert (tmp_path / "old").read_text() == "old"
    for path, said in (
        (tmp_path / "pipe", "is a named pipe; name a file"),
        (tmp_path, "is a folder; name a file"),
        (Path("/dev/null"), "is a character device; name a file"),
    ):
        with pytest.raises(UserError, match=f"-out {path}: {said}"):
            check_output_file(path, "-out")
    with pytest.raises(UserError, match="already exists"):
        check_output_file(tmp_path / "old", "-out", fresh=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "old", "pipe"], "the check leaves no file"


def test_write_error_at_the_end_is_one_line(tree: Path, vitamp: Callable[..., Result], tmp_path: Path) -> None:
    words = ("-dataset", "imagefolder", "-data_path", tree, "-num_classes", "1")
    done = vitamp(*words, "-fix", tmp_path / "a.txt", "-json", tmp_path / "a.txt", script="scripts/check_data.py")
    assert done.code == 2
    assert "-fix and -json both name" in done.err
    with (
        pytest.raises(UserError, match=r"-out x: cannot be written \(No space left on device\)"),
        writing(Path("x"), "-out"),
    ):
        raise OSError(28, "No space left on device")


def test_interrupted_tool_lists_what_it_wrote(
    tmp_path: Path, digits_run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(_argv: list[str]) -> int:
        raise KeyboardInterrupt

    with writing(tmp_path / "earlier", "-out"):  # by another tool in this process
        pass
    assert run_tool(interrupted, []) == EXIT_INTERRUPTED
    assert "interrupted; no result was written" in capsys.readouterr().err
    from tools.export import formats

    really, files = formats.compare, []

    def compare(*given: object) -> str:
        files.append(given)
        if len(files) == 2:
            raise KeyboardInterrupt
        return really(*given)  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(formats, "compare", compare)
    words = [str(digits_run), "-to", "torch,safetensors", "-out", str(tmp_path / "vit")]
    assert export.main(words) == EXIT_INTERRUPTED
    log.handlers.clear()
    assert f"interrupted; already written and complete: {tmp_path / 'vit.pt2'}" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["vit.pt2"]
