"""What all tools share: flags beside those of the entry scripts, and output files that are checked before the work."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.program import ROOT, Vitamp, save_image
from tests.refused import refusal
from tests.tools.conftest import interrupted
from tools.check_labels import command as check_labels
from tools.common.command_line import Tool, ToolLine, above_zero, tool
from tools.common.output_file import check_output_file, writing
from tools.evaluate import command as evaluate
from tools.export import command as export
from utils.errors import EXIT_INTERRUPTED, UserError
from utils.flags import Flag, whole
from utils.log import log

OWN = (
    Flag("out", "where to", "FILE.png"),
    Flag("count", "how many", "N", default=7, kind=whole(1, 8)),
    Flag("quiet", "say less"),
    Flag("above", "a number", "X", kind=above_zero),
)
TOOL = Tool("tool.py", "What it does.", OWN)


def read(*words: str) -> ToolLine:
    return TOOL.read(list(words))


def test_own_flags_and_those_of_the_run_are_kept_apart() -> None:
    line = read("-count=3", "-num_classes", "5", "-quiet", "TRAIN.SEED=1", "-cfg", "a.yaml")
    assert (line.asked.count, line.asked.quiet, line.asked.out) == (3, True, None)
    assert line.given == {"count", "quiet"}
    assert line.run.flags == {"MODEL.NUM_CLASSES": ("5", "-num_classes")}
    assert (line.run.cfg, line.run.words) == ("a.yaml", {"TRAIN.SEED": "1"})
    loaded = read("-count", "3", "-num_classes", "5").load({"DATA.DATASET": ("digits", "SRC")})
    assert (loaded.config.MODEL.NUM_CLASSES, loaded.config.DATA.DATASET) == (5, "digits")
    assert loaded.sources["DATA.DATASET"] == "SRC"


def test_a_folder_is_the_data_path_unless_it_is_the_model(tmp_path: Path) -> None:
    data, run = tmp_path / "photos", tmp_path / "run"
    data.mkdir()
    (run / "checkpoints").mkdir(parents=True)
    here = {"DATA.DATA_PATH": (str(data), "-data_path")}
    assert read(str(data), "-count", "3").run.flags == here
    by_features = check_labels.TOOL.read([str(run), str(data)])
    assert (by_features.asked.path, by_features.run.flags) == (str(run), here)
    by_training = check_labels.TOOL.read([str(data)])
    assert (by_training.asked.path, by_training.run.flags) == (None, here)
    assert evaluate.TOOL.read([str(data)]).asked.path == [str(data)], "which takes several models"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["-cuont", "3"], "unknown flag -cuont. Did you mean -count?"),
        (["-num_clases", "3"], "unknown flag -num_clases. Did you mean -num_classes?"),
        (["-count"], "-count needs a value: -count N (how many)"),
        (["-dry_run"], "tool.py has no -dry_run; use main_single_gpu.py, which has it"),
        (["-count", "0"], "-count 0: takes a whole number from 1 to 8."),
        (["-count", "1.5"], "-count 1.5: takes a whole number"),
        (["-above", "0"], "-above 0: takes a number above 0."),
        (["-above", "nan"], "-above nan: takes a number above 0."),
    ],
)
def test_mistakes(words: list[str], said: str) -> None:
    assert said in refusal(read, *words)


@pytest.mark.parametrize("word", ["-h", "--help"])
def test_help_shows_own_flags_and_exits_with_0(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        read("-count", "3", word)
    assert left.value.code == 0
    shown = capsys.readouterr().out
    assert shown.startswith("usage: python scripts/tool.py [DIR] [-flag value ...] [KEY=VALUE ...]\n\nWhat it does.\n")
    assert "\nFlags of this tool:\n  -out FILE.png  where to\n  -count N       how many (default: 7)\n" in shown
    assert "-num_classes" not in shown


def test_values_of_flags_and_files(tmp_path: Path) -> None:
    assert (read().asked.count, read("-count", "3").asked.count) == (7, 3)
    assert read("-above", "0.5").asked.above == 0.5
    assert read().file("out", ".png") is None
    assert read("-out", f"{tmp_path}/a.PNG").file("out", ".png") == tmp_path / "a.PNG"
    with pytest.raises(UserError, match=r"a\.jpg: name a file that ends in \.png, such as a\.png\."):
        read("-out", "a.jpg").file("out", ".png")


# Output files.


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


def test_what_is_printed_precedes_a_later_warning_in_one_pipe() -> None:
    script = "from utils.log import log, start_log; start_log(True); print('table'); log.warning('late')"
    words = [sys.executable, "-c", script]
    done = subprocess.run(words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=True)
    assert done.stdout == "table\nwarning: late\n"


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
def test_unusable_output_is_refused_before_the_work(
    tool: str, tree: Path, digits_run: Path, tmp_path: Path, vitamp: Vitamp
) -> None:
    (tmp_path / "file").write_text("")
    (ending,) = (word.removeprefix("{out}") for word in TOOLS[tool] if word.startswith("{out}"))
    old = tmp_path / f"old{ending}"
    old.write_text("mine")
    places = {
        str(tmp_path / "none" / "x"): f"the folder {tmp_path / 'none'} does not exist",
        str(tmp_path / "file" / "x"): f"{tmp_path / 'file'} is a file, not a folder",
        str(tmp_path / ("x" * 300)): "cannot be written (File name too long)",
        str(tmp_path / "old"): "already exists; name another file, or give -overwrite to replace it",
    }
    if ending == ".json":
        places[str(digits_run / "run")] = "belongs to the run in this folder, which needs it; name another file"
    if tool in ("evaluate", "report"):
        places[str(tmp_path / "new")] = "is one of 8 (OpenMPI). Start one; if this is the only one, put env -u OMPI_"
    of_many = {"OMPI_COMM_WORLD_SIZE": "8", "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}
    for out, said in places.items():
        words = [word.format(out=out, tree=tree, run=digits_run) for word in TOOLS[tool]]
        done = vitamp(*words, script=f"scripts/{tool.split()[0]}.py", env=of_many, code=2)
        assert said in done.err
        assert done.out == "", "no work was done"
    assert old.read_text() == "mine"


def test_output_file_accepts_only_regular_files(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "old").write_text("old")
    (tmp_path / "link").symlink_to("old")
    assert check_output_file(tmp_path / "new", "-out") == tmp_path / "new"
    assert check_output_file(tmp_path / "link", "-out") == tmp_path / "link"
    assert (tmp_path / "old").read_text() == "old"
    for path, said in (
        (tmp_path / "pipe", "is a pipe or device; name a file"),
        (tmp_path, "is a folder; name a file"),
        (Path("/dev/null"), "is a pipe or device; name a file"),
    ):
        with pytest.raises(UserError, match=f"-out {path}: {said}"):
            check_output_file(path, "-out")
    with pytest.raises(UserError, match="already exists"):
        check_output_file(tmp_path / "old", "-out", fresh=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "old", "pipe"], "the check leaves no file"


def test_interrupted_tool_lists_what_it_wrote(
    tmp_path: Path, digits_run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with writing(tmp_path / "earlier", "-out"):  # by another tool in this process
        pass
    assert tool(interrupted)([]) == EXIT_INTERRUPTED
    assert "interrupted; no result was written" in capsys.readouterr().err
    from tools.export import check

    really, files = check.compare, []

    def compare(*given: object) -> object:
        files.append(given)
        if len(files) == 2:
            raise KeyboardInterrupt
        return really(*given)  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(check, "compare", compare)
    words = [str(digits_run), "-to", "torch,safetensors", "-out", str(tmp_path / "vit")]
    assert export.main(words) == EXIT_INTERRUPTED
    log.handlers.clear()
    assert f"interrupted; already written and complete: {tmp_path / 'vit.pt2'}" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["vit.pt2"]
