"""compare.py: it trains each run once, resumes, and refuses bad input before training."""

import contextlib
import json
import re
import signal
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import pytest
import torch
import yaml

from tests.label_sets import write_recipe, write_set
from tests.program import ROOT, TINY_DIGITS, Result, metrics, save_image
from tests.tools.conftest import Trainings, interrupted
from tests.waiting import until
from tools.common import sessions
from tools.compare import command, runs
from tools.compare.command import main
from tools.compare.plan import read_modes
from tools.compare.runs import Run
from utils.config import Config, load_config
from utils.statistics.proportions import wilson

Call = Callable[..., Result]
pytestmark = pytest.mark.usefixtures("bf16_cpu")


@pytest.fixture
def compare(tiny: Path, tmp_path: Path, in_process: Callable[..., Callable[..., Result]]) -> Call:
    def call(*words: object, code: int = 0) -> Result:
        small = ("TRAIN.MAX_UPDATES=6", "REPORT_FREQ=2", "DATA.BATCH_SIZE_EVAL=360")
        return in_process(main)("-cfg", tiny, "-output", tmp_path / "out", *words, *small, code=code)

    return call


def ending_at_once(monkeypatch: pytest.MonkeyPatch, code: int) -> list[str]:
    """The names of the runs that were started; each ends at once with this exit code."""
    started: list[str] = []

    def start(command: list[str], *_: object) -> Any:
        started.append(Path(command[command.index("-output") + 1]).name)
        return SimpleNamespace(wait=lambda: code)

    monkeypatch.setattr(runs, "start", start)
    return started


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    return ending_at_once(monkeypatch, 1)


def test_runs_of_equal_time_may_go_on_once(compare: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that planned its epochs may take longer than planned, and be paused: it is resumed."""
    started = ending_at_once(monkeypatch, 0)
    vary = ("-vary", "lr=1e-3,1e-4", "-seeds", "1")
    said = compare(*vary, "-epochs", "auto", "-max_time", "0:10:00", code=1)
    assert started == ["lr-1e-3-0", "lr-1e-3-0", "lr-1e-4-0", "lr-1e-4-0"]
    assert "exit code 0, but it did not finish" in said.err
    assert said.text.count("was slower than it had planned") == 2
    own = yaml.safe_load((tmp_path / "out" / "lr-1e-3-0.yaml").read_text())
    assert (own["TRAIN"]["NUM_EPOCHS"], own["TRAIN"]["WARMUP_EPOCHS"], own["MAX_TIME"]) == ("auto", 0.5, "0:10:00")


def metrics_file(out: Path) -> dict[str, Any]:
    return json.loads((out / "compare.json").read_text(encoding="utf-8"))


def test_two_modes_are_trained_once_and_compared(
    compare: Call, trainings: Trainings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    printed = compare("-modes", "fp32,O1:bf16", "-seeds", "0,").out
    assert trainings.started == ["fp32-0", "bf16-0"]
    results = metrics_file(out)
    assert [(row["mode"], row["precision"]) for row in results["runs"]] == [("fp32", "fp32"), ("bf16", "bf16")]
    (_, row), (val,) = results["runs"], metrics(out / "bf16-0", "val")
    assert (row["last_acc1"], row["updates"], row["validation_images"]) == (val["acc1"], 6, 360)
    assert results["compared"] == ["fp32", "bf16"]
    assert results["settings"]["TRAIN.MAX_UPDATES"] == "6"
    assert results["versions"]["torch"]
    assert results["verdicts"][0]["text"] in printed
    assert "one seed is too few to compare accuracy" in printed
    assert "2 of 2: bf16, seed 0: top-1" in printed
    assert (out / "report.html").exists()

    trainings.started.clear()
    assert "already finished" in compare("-modes", "fp32,bf16", "-seeds", "0,").out
    assert trainings.started == []
    assert metrics_file(out)["runs"] == results["runs"]

    clock = [0.0]

    def slow(*_: object) -> Any:
        clock[0] += 100.0
        return SimpleNamespace(wait=lambda: 1)

    with monkeypatch.context() as patched:  # runs of 100 s each, beside the finished ones
        patched.setattr(runs, "start", slow)
        patched.setattr("utils.progress.time", SimpleNamespace(monotonic=lambda: clock[0]))
        said = compare("-modes", "fp32,bf16", "-seeds", "1,0", code=1)
        assert "3 of 4 runs, about 0:01:40 left" in said.out

    def refuse(path: Path, _content: object) -> None:
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr("tools.compare.command.write_json", refuse)
    monkeypatch.setattr("tools.common.report_page.page.write_atomically", refuse)
    said = compare("-modes", "fp32,bf16", "-seeds", "0,")
    assert results["verdicts"][0]["text"] in said.out, "the verdict is printed although the disk is full"
    assert f"{out / 'compare.json'}: cannot be written (No space left on device)" in said.err
    assert "all metrics:" not in said.out
    monkeypatch.setattr("tools.common.report_page.page.write_report", interrupted)
    assert results["verdicts"][0]["text"] in compare("-modes", "fp32,bf16", "-seeds", "0,", code=130).out


def test_parent_holds_no_gpu_during_training(compare: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every query of a GPU by torch initialises CUDA first."""
    opened: list[str] = []

    class Elsewhere(contextlib.nullcontext[Any]):
        def submit(self, work: Callable[..., Any], *given: object) -> Any:
            with monkeypatch.context() as there:
                there.setattr(torch.cuda, "_lazy_init", lambda: None)
                found = work(*given)
            return SimpleNamespace(result=lambda: found)

        def __enter__(self) -> Any:
            return self

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "_lazy_init", lambda: opened.append("here"))
    hopper = SimpleNamespace(name="H100", total_memory=80 * 2**30, major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "_get_device_properties", lambda _: hopper, raising=False)
    monkeypatch.setattr(sessions, "own_process", Elsewhere)
    monkeypatch.setattr(runs, "start", lambda *_: SimpleNamespace(wait=lambda: 1))
    compare("-device", "cuda", "-modes", "fp32,auto,tf32,fp8", "-seeds", "0,", code=1)
    assert metrics_file(tmp_path / "out")["compared"] == ["fp32", "fp16", "tf32", "fp8"]
    assert metrics_file(tmp_path / "out")["device"] == "H100, 80 GiB, compute capability 9.0"
    assert opened == []


def test_failed_run_is_reported_and_the_others_are_compared(
    compare: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Processes that fail with or without output; one that exits with 0 but did not finish."""

    def start(command: list[str], output: IO[bytes], _gpu: str | None) -> Any:
        name = Path(command[command.index("-output") + 1]).name
        if name == "fp32-0":
            output.write(b"Epoch 1\nwarning: hm\nerror: the gradients stopped being numbers\nand so on\n")
        return SimpleNamespace(wait=lambda: {"fp32-0": 1, "bf16-0": -9, "fp32-1": 0, "bf16-1": 1}[name])

    monkeypatch.setattr(runs, "start", start)
    said = compare("-modes", "fp32,bf16", "-seeds", "2", code=1)
    assert metrics_file(tmp_path / "out")["failed"] == {
        "fp32-0": "exit code 1: the gradients stopped being numbers",
        "bf16-0": "exit code -9: no output",
        "bf16-1": "exit code 1: no output",
        "fp32-1": "exit code 0, but it did not finish",
    }
    assert "1 of 4: fp32, seed 0 failed: exit code 1: the gradients stopped being numbers" in said.err
    assert "fp32: 2 of 2 runs failed: exit code 1: the gradients stopped being numbers" in said.out
    assert "bf16: no verdict" in said.out


@pytest.mark.parametrize(
    ("words", "script", "said"),
    [
        ((), "main_single_gpu.py", ""),
        (("NGPUS=-1",), "main_multi_gpu.py", "each run: 2 processes"),
        (("-ngpus", "2"), "main_multi_gpu.py", "each run: 2 processes"),
        (("-ngpus", "3"), None, "-ngpus 3: only 2 GPU(s) are visible"),
    ],
)
def test_ngpus_starts_main_multi_gpu(
    words: tuple[str, ...], script: str | None, said: str, compare: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    scripts = set[str]()
    monkeypatch.setattr("engine.machine.device.visible_gpus", lambda _: 2)
    monkeypatch.setattr(runs, "start", lambda command, *_: scripts.add(command[0]) or SimpleNamespace(wait=lambda: 1))
    done = compare("-modes", "fp32,bf16", "-seeds", "0,", *words, code=1 if script else 2)
    assert scripts == ({script} if script else set())
    assert said in done.text


@pytest.mark.parametrize(
    ("words", "output"),
    [
        (["-modes", "fp32,tf32"], "-modes tf32: this device has no TF32, which needs an NVIDIA GPU"),
        (["-modes", "fp32,bf61"], "unknown 'bf61'. Did you mean bf16? It takes fp32, tf32, bf16"),
        (["-modes", "bf16"], "the first is the baseline. Or judge one recipe with -folds 5, without -modes"),
        (["-modes", "fp32,bf16,auto"], "bf16 and auto are both bf16 on this device"),
        (["-modes", "fp32,O3:fp16"], "-modes O3-fp16: AMP.LEVEL O3 in fp16: squared gradients round to zero"),
        (["-seeds", "many"], "-seeds many: give a number of seeds"),
        (["-seeds", "1,1"], "a seed is listed twice"),
        (["-amp"], "AMP.ENABLED (-amp): cannot be given here; list the precisions"),
        (["SEED=3"], "SEED (on the command line): cannot be given here; give -seeds"),
        (["-resume", "x"], "compare.py has no MODEL.RESUME"),
        (["-max_time", "1:00:00"], "MAX_TIME (-max_time): cannot be given here; interrupt with Ctrl-C instead"),
        (["-batch_size", "auto"], "auto does not work in this tool; give a number"),
        (["-vary", "DATA.SAMPLER=shuffle"], "-vary DATA.SAMPLER=shuffle: name a setting or flag and at least two"),
        (["-vary", "DATA.SAMPLERS=a,b"], "-vary DATA.SAMPLERS: unknown key. Did you mean DATA.SAMPLER?"),
        (["-vary", "lrs=a,b"], "neither a setting nor a flag that sets one. Did you mean lr?"),
        (["-vary", "SEED=1,2"], "SEED cannot be varied; give -seeds"),
        (["-vary", "lr=1e-3,1e-4", "TRAIN.BASE_LR=0.1"], "TRAIN.BASE_LR (on the command line): cannot be given here"),
        (["-vary", "lr=1e-3,0.001"], "lr=1e-3 and lr=0.001 have the same settings here"),
        (["-vary", "DATA.SAMPLER=shuffle,sorted"], "DATA.SAMPLER"),
        (["-folds", "5", "-seeds", "3"], "-folds 5 -seeds 3: with -folds, all runs have the same seed"),
        (["-folds", "5", "DATA.FOLD=1/5"], "DATA.FOLD (on the command line): cannot be given here; leave out"),
        (["-folds", "5", "-dataset", "synthetic"], "DATA.FOLD 1/5: the data set synthetic"),
        (["-metric", "map", "-dataset=synthetic", "-num_classes=5"], "these runs. It takes loss, acc1, balanced_acc, "),
        (["-metric", "knn_acc1", "MODEL.MAE_PRETRAIN=true"], "-metric knn_acc1: not a metric of these runs"),
        (["-weights", "ema"], "no run has an EMA; it needs TRAIN.MODEL_EMA=true"),
    ],
)
def test_bad_input_is_refused_before_training(
    words: list[str], output: str, compare: Call, failing: list[str], tmp_path: Path
) -> None:
    assert output in compare(*words, code=2).err
    assert failing == []
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("failing")
def test_folder_with_other_settings_is_refused(compare: Call, tmp_path: Path) -> None:
    compare("-modes", "fp32,bf16", "-seeds", "1", code=1)
    said = compare("-modes", "fp32,bf16", "-seeds", "2", "TRAIN.BASE_LR=0.5", "TAG=mine", code=2).err
    assert "fp32-0: was trained with other settings: TRAIN.BASE_LR: 0.002 -> 0.5; TAG: null -> mine" in said
    assert "choose another -output" in said
    said = compare("-modes", "fp32,bf16", "-seeds", "1", "-metric", "balanced_acc", code=1).out
    assert "SAVE_BEST_BY acc1: chooses the best checkpoint of each run" in said, "runs that were begun keep it"
    said = compare("-modes", "fp32,bf16", "-seeds", "1", "SAVE_BEST_BY=loss", code=2).err
    assert "was trained with other settings: SAVE_BEST_BY: acc1 -> loss" in said
    compare("-modes", "fp32,O2", "-seeds", "2", code=1)  # more modes and seeds are accepted
    assert sorted(path.stem for path in (tmp_path / "out").glob("*.yaml")) == [
        *("O2-bf16-0", "O2-bf16-1", "bf16-0", "fp32-0", "fp32-1")
    ]
    listed = tmp_path / "list.txt"
    for name, code in (("a.jpg", 1), ("a.jpg", 1), ("b.jpg", 2)):
        listed.write_text(name)
        said = compare("-vary", f"DATA.EXCLUDE=null,{listed}", "-seeds", "1", code=code).err
    assert "list.txt-0: was trained with other settings: DATA.EXCLUDE or DATA.RELABEL: other lines. Give" in said
    table, titles = tmp_path / "list.csv", list[str]()  # scores and order do not count
    run = Run("", 0, Config.model_validate({"DATA": {"RELABEL": str(table)}}), tmp_path)
    for rows in ("1,a,b,.9,drop\n2,a,b,.8,drop", "2,a,b,.7,drop\n1,a,b,.9,drop", "1,a,b,.9,drop\n2,a,b,.8,keep"):
        table.write_text(f"path,given,proposed,score,decision\n{rows}\n")
        titles.append(run.title)
    assert titles[0] == titles[1] != titles[2]


def test_read_modes(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    names = "O0, O2:bf16,naive-FP16,O3,auto,fp16,fp8,O2-fp16,NAIVE"
    assert [mode.name for mode in read_modes(names, Config(), cpu)] == [
        *("fp32", "O2-bf16", "NAIVE-fp16", "O3-bf16", "bf16", "fp16", "fp8", "O2-fp16", "NAIVE-bf16")
    ]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    on_gpu = read_modes("tf32,auto,O2", Config(), torch.device("cuda"))
    assert [mode.name for mode in on_gpu] == ["tf32", "fp16", "O2-fp16"]
    own = Config.model_validate({"AMP": {"LEVEL": "O2", "DTYPE": "fp16"}})
    assert [mode.name for mode in read_modes("auto,on,NAIVE", own, cpu)] == ["O2-bf16", "O2-fp16", "NAIVE-fp16"]


def test_grid_of_settings(compare: Call, trainings: Trainings, tmp_path: Path) -> None:
    words = ["-vary", "DATA.SAMPLER=shuffle,balanced", "-vary", "TRAIN.MODEL_EMA=false,true", "-seeds", "3,"]
    said = compare(*words, "-amp", "bf16", "-metric", "balanced_acc").out
    results = metrics_file(tmp_path / "out")
    assert results["compared"] == [
        f"SAMPLER={sampler}, MODEL_EMA={ema}"
        for sampler, ema in (("shuffle", "false"), ("shuffle", "true"), ("balanced", "false"), ("balanced", "true"))
    ]
    assert trainings.started[:2] == ["SAMPLER-shuffle-MODEL-EMA-false-3", "SAMPLER-shuffle-MODEL-EMA-true-3"]
    assert results["varied"] == ["DATA.SAMPLER", "TRAIN.MODEL_EMA"]
    assert (results["metric"], results["weights"]) == ("balanced_acc", "ema")
    best_by = "SAVE_BEST_BY balanced_acc: chooses the best checkpoint of each run; the verdict is of balanced accuracy"
    assert best_by in said
    assert results["settings"]["SAVE_BEST_BY"] == "balanced_acc"
    row = results["runs"][1]
    (val,) = metrics(tmp_path / "out" / row["folder"], "val")
    assert (row["last_ema_balanced_acc"], row["precision"]) == (val["ema_balanced_acc"], "bf16")
    assert row["largest_class_percent"] == pytest.approx(100 * 37 / 360, abs=2)
    assert "balanced accuracy: after the last epoch, of the EMA in runs that have one" in said
    counts = results["recall"]["SAMPLER=balanced, MODEL_EMA=false"]
    recall = [100 * right / images for right, images in counts.values()]
    assert statistics.fmean(recall) == pytest.approx(results["runs"][2]["last_balanced_acc"])
    page = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    low, high = wilson(recall[0], counts["0"][1])
    shown = "{:.1f} % ({:.0f} to {:.0f}; {} of {})".format(recall[0], low, high, *counts["0"])
    assert f'<td class="n">{shown}</td>' in page
    assert shown in said
    assert "<h3>Balanced accuracy of each setting (%)</h3>" in page
    assert '<th scope="col" class="n">balanced accuracy of the best checkpoint</th>' in page
    assert '<th scope="col" class="n">top-1 of the best checkpoint</th>' not in page
    judged = [one.get("last_ema_balanced_acc") or one["last_balanced_acc"] for one in results["runs"]]
    best = next(one["mode"] for one in results["runs"] if max(judged) in one.values())
    assert re.search(rf'class="contender hue\d shade\d best"><span class="who">{re.escape(best)}<', page)
    assert "4 runs: SAMPLER=shuffle, MODEL_EMA=false; SAMPLER=shuffle, MODEL_EMA=true; " in said


def test_recipes_and_values_with_commas_are_compared(tiny: Path, tmp_path: Path, failing: list[str]) -> None:
    (tmp_path / "deeper.yaml").write_text(f"BASE: ['{tiny}']\nMODEL: {{DEPTH: 2}}\n", encoding="utf-8")
    words = ["-vary", f"cfg={tiny},{tmp_path / 'deeper.yaml'}", "-seeds", "0,", "-output", str(tmp_path / "out")]
    assert main([*words, "-vary", "TRAIN.OPTIMIZER.BETAS=[0.9,0.95],[0.9,0.999]"]) == 1
    betas = ("BETAS-0.9-0.95-0", "BETAS-0.9-0.999-0")
    assert failing == [f"{recipe}-{each}" for recipe in (tiny.stem, "deeper") for each in betas]
    results = metrics_file(tmp_path / "out")
    assert "deeper, BETAS=[0.9,0.999]" in results["compared"]
    assert not {"MODEL.DEPTH", "TRAIN.OPTIMIZER.BETAS"} & results["settings"].keys(), "those of all runs"
    config = load_config(str(tmp_path / "out" / f"deeper-{betas[1]}.yaml")).config
    assert (config.MODEL.DEPTH, config.TRAIN.OPTIMIZER.BETAS) == (2, (0.9, 0.999))


def test_each_mode_is_trained_on_each_fold(
    compare: Call, failing: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, start, commands = "TAG='https://me:secret@host/x'", runs.start, list[list[str]]()
    monkeypatch.setattr(sys, "argv", ["compare.py", url])
    monkeypatch.setattr(runs, "start", lambda command, *rest: commands.append(command) or start(command, *rest))
    said = compare("-modes", "fp32,bf16", "-folds", 3, url, code=1)
    assert all(url in command for command in commands)
    assert not [path for path in (tmp_path / "out").glob("*.*") if b"secret" in path.read_bytes()]
    assert failing == ["fp32-fold1", "bf16-fold1", "bf16-fold2", "fp32-fold2", "fp32-fold3", "bf16-fold3"]
    settings = load_config(str(tmp_path / "out/bf16-fold2.yaml")).config
    assert (settings.DATA.FOLD, settings.SEED, settings.AMP.DTYPE) == ("2/3", 0, "bf16")
    assert "6 runs: fp32, bf16, on each of 3 folds, with seed 0; in" in said.out
    assert "fp32, fold 1/3 failed" in said.err
    results = metrics_file(tmp_path / "out")
    assert (results["seeds"], results["folds"]) == ([0], 3)
    assert "://***@host/x" in results["command"], "no password is kept"
    said = compare("-modes", "fp32,bf16", "-folds", 5, url, code=2)
    assert "fp32-fold1: was trained with other settings: DATA.FOLD: 1/3 -> 1/5. Give" in said.err


def test_one_recipe_is_judged_by_all_its_folds(compare: Call, trainings: Trainings, tmp_path: Path) -> None:
    said = compare("-folds", "2", "-budget_min", "0.0001")
    assert trainings.started == ["tiny-fold1"]
    assert "no time for 1 run: tiny, fold 2/2" in said.err
    assert re.search(r"tiny: accuracy \d.*, right on \d+ of the 89\d images of 1 of 2 folds \(95 % interval", said.out)

    said = compare("-folds", "2", "-amp", "off")
    assert trainings.started == ["tiny-fold1", "tiny-fold2"], "what is finished is not repeated"
    results = metrics_file(tmp_path / "out")
    assert (results["compared"], results["verdicts"]) == (["tiny"], [])
    found, rows = results["all_folds"]["tiny"], results["runs"]
    right = [round(row["last_acc1"] * row["validation_images"] / 100) for row in rows]
    assert (found["right"], found["images"]) == (sum(right), 1797)
    assert (found["low"], found["high"]) == pytest.approx(wilson(100 * sum(right) / 1797, 1797))
    low, high = (f"{one:.2f} %" for one in sorted(row["last_acc1"] for row in rows))
    assert f"right on {sum(right):,} of the 1,797 images (95 % interval {found['low']:.2f} to " in said.out
    mean = statistics.fmean(row["last_acc1"] for row in rows)
    assert re.search(rf"; accuracy from fold to fold {mean:.2f} ± [\d.]+ \({low} to {high}\)\n", said.out)
    assert "the accuracy of the recipe with 50 % of the images" in said.out
    assert "baseline" not in said.out, "nothing is as fast as nothing"
    page = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    assert f"right on {sum(right):,} of the 1,797 images" in page
    assert "recall, all folds (95 % interval)" in page


@pytest.mark.slow
def test_budget_leaves_runs_out_and_goes_on(compare: Call, trainings: Trainings, tmp_path: Path) -> None:
    words = ["-modes", "fp32,bf16", "-seeds", "2"]
    said = compare(*words, "-budget_min", "0.0001")
    assert trainings.started == ["fp32-0"], "a run whose time is not known is started"
    assert metrics_file(tmp_path / "out")["left_out"] == ["bf16, seed 0", "bf16, seed 1", "fp32, seed 1"]
    assert re.search(r"no time for 3 runs: bf16, .*, seed \d takes about 0:00:0\d more: give a larger", said.err)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(runs.History, "seconds", 1e6)  # as if the others had been interrupted near their ends
        compare(*words, "-budget_min", 60)
    assert len(metrics_file(tmp_path / "out")["runs"]) == 4


@pytest.mark.slow
@pytest.mark.usefixtures("trainings")
def test_several_labels_are_compared_by_map(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_set(tmp_path)
    where = ["-cfg", str(write_recipe(tmp_path)), "-output", str(tmp_path / "out")]
    assert main([*where, "-vary", "lr=1e-3,1e-4", "-seeds", "0,", "TRAIN.MAX_UPDATES=2"]) == 0
    results = metrics_file(tmp_path / "out")
    (val,) = metrics(tmp_path / "out/lr-1e-4-0", "val")
    assert (results["metric"], results["runs"][1]["last_map"]) == ("map", val["map"])
    assert "last mAP (%)" in capsys.readouterr().out


@pytest.mark.usefixtures("trainings")
def test_runs_without_labels_have_a_page(tmp_path: Path, in_process: Callable[..., Call]) -> None:
    for number in range(8):
        save_image(tmp_path / "images" / f"{number}.png", seed=number)
    small = ("-mae_pretrain", "MODEL.DECODER.EMBED_DIM=16", "MODEL.DECODER.DEPTH=1", "MODEL.DECODER.NUM_HEADS=2")
    (tmp_path / "tiny.yaml").write_text(TINY_DIGITS, encoding="utf-8")
    where = ("-dataset", "images", "-data_path", tmp_path / "images", "-output", tmp_path / "out", "-batch_size", 4)
    in_process(main)("-cfg", tmp_path / "tiny.yaml", *small, *where, "-vary", "lr=1e-3,1e-4", "-seeds", "0,", code=0)
    assert "hidden, predicted, original" in (tmp_path / "out" / "report.html").read_text(encoding="utf-8")


@pytest.mark.slow
def test_search_of_the_page_runs(tmp_path: Path) -> None:
    """The code for Optuna in docs/compare.md, with one epoch and a smaller model."""
    page = (ROOT / "docs/compare.md").read_text(encoding="utf-8")
    code = page.partition("```python\n")[2].partition("```")[0]
    for theirs, ours in (
        ('"-epochs", "3"', '"-epochs", "1", "MODEL.DEPTH=1", "-device", "cpu"'),
        ("n_trials=20", "n_trials=1"),
        ('"main_single_gpu.py"', f'"{ROOT}/main_single_gpu.py"'),
        ('"configs/', f'"{ROOT}/configs/'),
    ):
        assert code.count(theirs) == 1
        code = code.replace(theirs, ours)
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "{'lr': " in done.stdout
    assert (tmp_path / "output/search/0/metrics.jsonl").exists()


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_interrupted_comparison_resumes(
    number: int, code: int, vitamp: Callable[..., Any], tiny: Path, tmp_path: Path
) -> None:
    out, words = tmp_path / "out", ["-cfg", str(tiny), "TRAIN.NUM_EPOCHS=6"]
    compared = ["-modes", "fp32,bf16", "-seeds", "2", "-output", str(out)]
    command = [sys.executable, str(ROOT / "scripts/compare.py"), *words, *compared]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as first:
        file = out / "bf16-0" / "metrics.jsonl"
        until(lambda: file.exists() and metrics(out / "bf16-0", "epoch"), 300)
        first.send_signal(number)
        said, _ = first.communicate(timeout=180)
    assert first.returncode == code, said
    assert "the same command resumes" in said
    assert subprocess.run(["pgrep", "-f", str(out)], check=False).returncode == 1, "no process of it is left"
    assert [row["folder"] for row in metrics_file(out)["runs"]] == ["fp32-0"]
    assert metrics(out / "bf16-0")[-1]["what"] == "paused"
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr
    assert [row["folder"] for row in metrics_file(out)["runs"]] == ["fp32-0", "bf16-0", "bf16-1", "fp32-1"]
    assert metrics_file(out)["runs"][1]["starts"] == 2
    assert "2 seeds are few" in done.stdout
    vitamp(*words, "-amp", "bf16", "-output", tmp_path / "plain", code=0)
    assert metrics(out / "bf16-0", "train") == metrics(tmp_path / "plain", "train")
    assert (out / "report.html").exists()


def test_recipes_of_one_name_are_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["-vary", "cfg=vit_digits,configs/vit_digits.yaml", "-output", str(tmp_path / "out")]) == 2
    assert "vit_digits and vit_digits would have the same folder" in capsys.readouterr().err


def test_folds_say_that_their_interval_allows_for_groups() -> None:
    accuracy = {"acc1": 75.0, "low": 60.0, "high": 86.0, "right": 90, "images": 120, "groups": 30}
    comparison: dict[str, Any] = {"compared": ["tiny"], "runs": [{"last_acc1": 75.0}] * 2, "folds": 2, "metric": "acc1"}
    comparison |= {"weights": "model", "all_folds": {"tiny": accuracy}}
    said, whose = command._words_on_only_contender(comparison)
    assert "for images of other groups like these)" in whose
    assert "(95 % interval 60.00 to 86.00 %, which allows for 30 groups of DATA.GROUP)" in said
    accuracy["groups"] = 0
    assert "DATA.GROUP" not in command._words_on_only_contender(comparison)[0]
