"""scripts/auto.py: from a folder to an evaluated model; test images decide nothing, and a kill loses nothing."""

import csv
import json
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from signal import SIGINT
from types import SimpleNamespace
from typing import IO, Any, cast

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import save_file

import vitamp
from engine.machine.device import each_device
from engine.trained.model import Trained, load_trained
from tests.forking import ROOT
from tests.program import Result, Vitamp, metrics
from tests.tools.conftest import Trainings, interrupted
from tools.auto import candidates, command, search
from tools.auto import data as tables
from tools.auto.record import Record
from tools.common.command_line import ToolLine
from tools.common.evaluation import OneLabel
from tools.compare.runs import Run, train_together
from utils.config import Config
from utils.errors import UserError
from utils.record.folder_lock import FolderLock
from utils.statistics.paired import interval_and_test

Call = Callable[..., Result]
CLASSES = ("ant", "bee", "cat")
STRIPES = np.s_[:, :16], np.s_[:16], np.s_[::4]
"""Which pixels of an image of each class are bright"""
MODEL = "test_vit"


def write_images(root: Path, images: int, seed: int = 0) -> None:
    """Class folders of small PNG files whose class can be seen."""
    generator = np.random.default_rng(seed)
    for number in range(images):
        pixels = generator.integers(0, 120, (32, 32, 3), dtype=np.uint8)
        pixels[STRIPES[number % 3]] += np.uint8(100)
        folder = root / CLASSES[number % 3]
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(folder / f"{seed}_{number}.png")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with 90 images in `data`, and weights of two tiny models. Not to be changed: tests share it."""
    folder = tmp_path_factory.mktemp("auto")
    write_images(folder / "data", images=90)
    torch.manual_seed(0)
    for name in (MODEL, "test_convnext"):
        save_file(timm.create_model(name).state_dict(), folder / f"{name}.safetensors")
    return folder


@pytest.fixture
def auto(
    in_process: Callable[[Any], Call], made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trainings: Trainings
) -> Call:
    """auto.py in this process, with results in tmp_path/out; its time begins now."""
    assert trainings.started == []
    monkeypatch.setattr(candidates, "TIMES", 1)
    monkeypatch.setattr(search, "LEAST_TRIAL", 1)  # of such small images

    def call(*words: object, data: Path = made / "data", code: int = 0, limit: str = "0:04:00") -> Result:
        monkeypatch.setattr("tools.auto.record.BEGAN", time.monotonic())
        weights = () if "-weights" in words else ("-weights", f"{MODEL}={made / MODEL}.safetensors")
        small = ("-device", "cpu", "-image_size", 32, "THREADS=1", "DATA.NUM_WORKERS=0", "TRAIN.MAX_UPDATES=8")
        out = ("-output", tmp_path / "out", "-max_time", limit, f"DATA.CACHE={tmp_path / 'cache'}")
        return in_process(command.main)(data, *weights, *out, *small, *words, code=code)

    return call


def splits(table: Path) -> dict[str, set[str]]:
    """The images of each split in a table."""
    found: dict[str, set[str]] = {"train": set(), "val": set(), "test": set()}
    for row in csv.DictReader(table.read_text().splitlines()):
        found[row["split"]].add(row["path"])
    return found


def record(out: Path) -> dict[str, Any]:
    return json.loads((out / "auto.json").read_text())


@pytest.mark.slow
def test_a_folder_becomes_an_evaluated_model(
    auto: Call, made: Path, tmp_path: Path, trainings: Trainings, vitamp: Vitamp
) -> None:
    out = tmp_path / "out"
    weights = f"{MODEL}={made / MODEL}.safetensors,{MODEL}@48={made / MODEL}.safetensors"
    said = auto("-weights", weights)
    assert trainings.started == ["test-vit-48", "test-vit", "final"] or trainings.started[-1].startswith("final")
    decided = record(out)
    assert set(decided["candidates"]) == {MODEL, f"{MODEL}@48"}
    assert decided["winner"] in decided["candidates"]
    found, final = splits(out / "split.csv"), splits(out / "final.csv")
    assert [len(found[part]) for part in ("train", "val", "test")] == pytest.approx([63, 13.5, 13.5], abs=1.5)
    assert re.search(rf"{MODEL}@48 \S+ % \(.*?\) after \d+ epochs? \(its probe \S+ %\)", said.out)
    assert final["test"] == found["test"], "no test image is trained on"
    assert final["train"] > found["train"]
    assert len(final["val"]) == 3, "of each class one"
    checkpoints = json.loads((out / "final" / "checkpoints" / "index.json").read_text())
    assert checkpoints["best"] == checkpoints["last"] != "step-000000000", "these three choose no checkpoint"
    assert len(metrics(out / "final", "val")) == 1
    assert f"of {len(found['test'])} test images, which decided nothing" in said.out
    assert "always guessing the largest class" in said.out
    fewer = re.search(
        r"more images: \S+ points .* images: .* % with (\d+), .* % with (\d+), .* % with (\d+)\n", said.out
    )
    assert fewer is not None
    fourth, half, all_images = map(int, fewer.groups())
    assert all_images == len(final["train"])
    assert [half, fourth] == pytest.approx([all_images / 2, all_images / 4], abs=2)
    assert re.search(rf"larger images: .* {MODEL}@48 against {MODEL}\n", said.out)
    points = [float(value) for value in re.findall(r"er? images: (\S+) points", said.out)]
    assert points == sorted(points, reverse=True)
    assert re.search(rf"More time may help, too: it was trained for {decided['epochs']} epochs?, and 20", said.out)
    assert "Labels: no evidence of wrong ones" in said.out
    assert (out / "answer.txt").read_text().splitlines()[-12:] == said.out.splitlines()[-12:]

    printed = re.search(r"Train it by itself: python (\S+) (.*) -output NEW", said.out)
    assert printed is not None
    script, words = printed.groups()
    assert "MAX_TIME=null" in words
    repeated = vitamp(*words.split(), "-output", tmp_path / "new", script=script, code=0)
    assert "a group of its own" not in repeated.text
    images = torch.arange(3 * 32 * 32).remainder(256).to(torch.uint8).view(1, 3, 32, 32)
    size = (int(decided["candidates"][decided["winner"]]["pixels"]),) * 2
    images = torch.nn.functional.interpolate(images.float(), size).to(torch.uint8)
    assert torch.equal(load_trained(tmp_path / "new").logits(images), load_trained(out / "final").logits(images))

    trainings.started.clear()
    again = auto("-weights", weights)
    assert trainings.started == []
    assert again.out.splitlines()[-5:] == said.out.splitlines()[-5:]
    assert "all was done by an earlier call, and is shown again; another -output begins anew" in again.text

    assert "training was cut" not in said.out
    del decided["stages"]["answer"]
    for rate, is_said in ((0.05, False), (0.5, True)):
        (out / "auto.json").write_text(json.dumps(decided | {"rate_at_end": rate}))
        words = auto("-weights", weights).out
        assert ("Perhaps too low: training was cut" in words) == is_said
        assert ("cut at 50 % of its highest learning rate." in words) == is_said


@pytest.mark.slow
def test_wrong_labels_are_counted(auto: Call, tmp_path: Path, vitamp: Vitamp) -> None:
    write_images(tmp_path / "data", images=300)
    for number in range(30):  # each into the folder of the next class
        path = tmp_path / "data" / CLASSES[number % 3] / f"0_{number}.png"
        path.rename(path.parent.parent / CLASSES[(number + 1) % 3] / path.name)
    said = auto(data=tmp_path / "data")
    printed = re.search(r"Labels: (\d+) labels look wrong; .* python \S+ (-cfg .*) -output labels lists them", said.out)
    assert printed is not None
    count, words = printed.groups()
    assert 10 <= int(count) <= 30, "of about 25 among the training images"
    listed = vitamp(*words.split(), "-output", tmp_path / "labels", script="scripts/check_labels.py", code=0)
    assert f"{count} labels look wrong" in listed.out, "of the same images"

    (tmp_path / "out").rename(tmp_path / "before")
    decisions = tmp_path / "labels" / "suspects.csv"
    auto(f"DATA.RELABEL={decisions}", data=tmp_path / "data")
    dropped = {row["path"] for row in csv.DictReader(decisions.open()) if row["decision"] == "drop"}
    assert len(dropped) >= int(count)
    divided = set().union(*splits(tmp_path / "out" / "split.csv").values())
    assert 0 < len(dropped - divided) < len(dropped), "those that check_data.py would call validation stay"


@pytest.mark.slow
def test_runs_train_in_several_processes(auto: Call, tmp_path: Path) -> None:
    said = auto("-ngpus", 2)
    out = tmp_path / "out"
    for run in (out / "trials" / "test-vit", out / "final"):
        assert (run / "ranks" / "1.log").exists()
    assert "no effect" not in said.text
    assert "Train it by itself: python main_multi_gpu.py" in said.out


@pytest.mark.slow
def test_several_devices_take_trials_side_by_side(
    auto: Call, made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trainings: Trainings
) -> None:
    weights = ",".join(f"{MODEL}@{size}={made / MODEL}.safetensors" for size in (48, 64, 80))
    words = ("-weights", weights, "-ngpus", 2)
    signals = list[int]()

    def start(command: list[str], output: IO[bytes], gpu: str | None) -> SimpleNamespace:
        """A trial, while which auto.py gets Ctrl-C."""
        process = trainings.start(command, output, gpu)

        def wait() -> int:
            if not signals:
                raise KeyboardInterrupt
            return process.wait()

        return SimpleNamespace(wait=wait, send_signal=signals.append)

    with monkeypatch.context() as patched:
        patched.setattr("tools.compare.runs.start", start)
        auto(*words, code=130)
    assert signals == [SIGINT, SIGINT], "one Ctrl-C ends both trials"
    said = auto(*words)
    first, second, third, *_ = trainings.started
    assert [{first, second}, third] == [{"test-vit-48", "test-vit-64"}, "test-vit-80"], "each once"
    assert record(tmp_path / "out")["seconds_per_trial"] == pytest.approx(240 / 3 / 2, abs=1), "three take two turns"
    trials = tmp_path / "out" / "trials"
    assert not list(trials.glob("*/ranks/1.log")), "each trial has one process"
    assert (tmp_path / "out" / "final" / "ranks" / "1.log").exists() or "final-probe" in said.out
    assert re.search(r"Trials: .*test_vit@48 .*; test_vit@64 .*; test_vit@80 ", said.out) is not None


def test_each_trial_sees_a_gpu_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert each_device(Config()) == ["0", "1", "2"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,7")
    config = Config().changed(NGPUS=2)
    assert each_device(config) == ["4", "5"]
    assert each_device(config.changed(DEVICE="cpu")) == [None, None]

    program = tmp_path / "main_single_gpu.py"
    program.write_text("import os\nprint('error: sees', os.environ['CUDA_VISIBLE_DEVICES'])\nraise SystemExit(2)\n")
    monkeypatch.setattr("tools.compare.runs.ROOT", tmp_path)
    runs = [Run(name, 0, Config(), tmp_path / name) for name in ("a", "b")]
    assert train_together(runs, gpus=each_device(config)) == ["exit code 2: sees 4", "exit code 2: sees 5"]


@pytest.mark.slow
def test_test_images_are_read_at_the_end_alone(auto: Call, tmp_path: Path, trainings: Trainings) -> None:
    """The test images are no images until all is trained."""
    data, out = tmp_path / "data", tmp_path / "out"
    write_images(data / "train", images=60)
    write_images(data / "test", images=12, seed=1)
    copied = next((data / "train" / "ant").iterdir())
    (data / "train" / "bee" / "copy.png").write_bytes(copied.read_bytes())
    images = {path: path.read_bytes() for path in (data / "test").rglob("*.png")}
    for path in images:
        path.write_text("no image")
    assert "12 validation images cannot be read" in auto(data=data, code=1).err
    assert list(record(out)["stages"]) == ["data", "probes", "trials", "final"]
    for path, content in images.items():
        path.write_bytes(content)
    trainings.started.clear()
    said = auto(data=data)
    assert trainings.started == []
    assert "the data's own test split" in said.out
    assert f"check_data.py {data}` lists: the same image with different labels: 2" in said.out
    assert "of 12 test images, which decided nothing" in said.out


@pytest.mark.slow
def test_a_killed_call_goes_on(
    auto: Call, tmp_path: Path, trainings: Trainings, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    with monkeypatch.context() as patched:
        patched.setattr("tools.compare.runs.start", interrupted)
        assert "given again, the same command goes on" in auto(code=130).err
    decided = record(out)
    assert list(decided["stages"]) == ["data", "probes"]
    table = (out / "split.csv").stat().st_mtime_ns
    said = auto(limit="0:05:00")
    assert (out / "split.csv").stat().st_mtime_ns == table
    assert trainings.started[0] == "test-vit"
    assert decided["stages"]["probes"][0] in said.out, "what was decided before is printed again"
    now = record(out)
    assert now["seconds_per_trial"] == decided["seconds_per_trial"]
    assert now["seconds"] > decided["seconds"]
    assert metrics(out / "trials" / "test-vit", "val")
    # A call that is killed writes nothing, but its run has logged: 100 seconds longer.
    saved = (out / "auto.json").stat().st_mtime
    os.utime(out / "final" / "log.txt", (saved + 100, saved + 100))
    monkeypatch.setattr("tools.auto.record.BEGAN", time.monotonic())
    assert Record(out, now["asked"], 240).used == pytest.approx(now["seconds"] + 100, abs=5)
    for changed in (("SEED=3",), ("-cfg", "small_images")):
        assert "name another -output" in auto(*changed, code=2).err


def test_the_time_of_probes_counts_after_a_kill(
    auto: Call, made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    probe = search.probe
    seconds = []

    def slow_probe(trained: Trained) -> candidates.Probe:
        seconds.append(record(tmp_path / "out")["seconds"])
        if len(seconds) == 2:
            raise UserError("enough")
        time.sleep(1)
        return probe(trained)

    monkeypatch.setattr(search, "probe", slow_probe)
    weights = f"{MODEL}={made / MODEL}.safetensors"
    auto("-weights", f"{weights},{MODEL}@48={made / MODEL}.safetensors", code=2)
    assert seconds[1] > seconds[0] + 1


def too_short(monkeypatch: pytest.MonkeyPatch, *folders: str) -> None:
    """Let the runs in these folders fail as one whose time is too short for an epoch."""

    def train(runs: list[Run], *words: str, **how: Any) -> list[str | None]:
        (run,) = runs
        if run.folder.name in folders or run.folder.parent.name in folders:
            return ["exit code 2: MAX_TIME is too short: it takes 9 s. More would do."]
        return train_together(runs, *words, **how)

    monkeypatch.setattr(search, "train_together", train)


@pytest.mark.slow
@pytest.mark.parametrize("is_tried", [True, False])
def test_without_time_for_a_trial_validation_decides_about_the_only_training(
    auto: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trainings: Trainings, is_tried: bool
) -> None:
    too_short(monkeypatch, "trials")
    if not is_tried:
        monkeypatch.setattr(search, "LEAST_TRIAL", 100)  # of four minutes, a third is less
    out = tmp_path / "out"
    said = auto()
    if is_tried:
        assert f"  {MODEL} was not fine-tuned in 0:00:40: it takes 9 s\n" in said.out
    else:
        assert f"  not tried, since there is too little time: {MODEL}; -max_time 0:05:00 with another" in said.out
        assert trainings.started == ["final"]
    assert "on training images alone; validation has chosen the epoch" in said.out
    assert f"DATASET: csv:{out / 'split.csv'}" in (out / "final" / "config.yaml").read_text()
    assert len(metrics(out / "final", "val")) > 1


@pytest.mark.slow
@pytest.mark.parametrize("has_time", [True, False])
def test_without_time_for_a_final_training_the_probe_is_the_answer(
    auto: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_time: bool
) -> None:
    """Of all images, or of as many as there is time for."""
    too_short(monkeypatch, "trials", "final")
    train_final = search.Search.train_final

    def slowly(of_all: search.Search) -> list[str]:
        monkeypatch.setattr(search, "PASSES_OF_TEST", 1e9)
        return train_final(of_all)

    if not has_time:
        monkeypatch.setattr(search.Search, "train_final", slowly)
    said = auto()
    out = tmp_path / "out"
    images = {part: len(splits(out / f"{part}.csv")["train"]) for part in ("split", "final")}
    if has_time:
        assert f"({images['final']}; 3 validate" in said.out
    else:
        assert f"({images['split']} of {images['final']}, as many as time allows; 3 validate" in said.out
    assert "with its probe as classifier, on " in said.out
    assert "\n  fine-tuning failed: it takes 9 s\n" in said.out
    assert "training was cut" not in said.out
    assert record(tmp_path / "out")["run"].endswith("final-probe")
    assert "of 13 test images, which decided nothing" in said.out


def test_a_probe_of_many_images_has_some_of_each_class_in_whole_groups(tmp_path: Path) -> None:
    lines = ["path,target,group,split"]
    lines += [f"{number}.png,common,{number // 4},train" for number in range(200)]
    lines += ["rare.png,rare,rare,train", "v.png,rare,v,val", "t.png,common,t,test"]
    table = tmp_path / "split.csv"
    table.write_text("\n".join(lines) + "\n")
    images = tables.write_probed(table, tmp_path / "probe.csv", 30)
    assert 30 <= images < 34
    rows = tables.read_table(tmp_path / "probe.csv")
    training = [row for row in rows if row["split"] == "train"]
    assert len(training) == images
    assert "rare.png" in {row["path"] for row in training}
    assert [row["path"] for row in rows if row["split"] != "train"] == ["v.png", "t.png"]
    whole = [row for row in tables.read_table(table) if row["group"] in {row["group"] for row in training}]
    assert training == whole


def test_bad_weights_are_refused_before_images_are_read(
    auto: Call, made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tools.auto.data.scan_split", interrupted)
    missing = made / "test_vitt.safetensors"
    twice = f"{MODEL}={made / MODEL}.safetensors"
    assert "is listed twice" in auto("-weights", f"{twice},{twice}", code=2).err
    assert f"{missing}: no such file" in auto("-weights", f"{MODEL}={missing}", code=2).err
    assert "not a timm model" in auto("-weights", "no_such_model", code=2).err
    assert f"name its model, too: MODEL={made / MODEL}" in auto("-weights", made / f"{MODEL}.safetensors", code=2).err
    assert "list models in -weights" in auto("-model", "resnet18", code=2).err

    def no_network(name: str) -> None:
        raise candidates.UserError(f"{name}: no network")

    monkeypatch.setattr(candidates, "locate", no_network)
    said = auto("-weights", "resnet18,resnet50", code=2).err
    assert "No pretrained weights on this machine, and none can be fetched: resnet18, resnet50." in said
    assert "-weights MODEL=FILE" in said
    assert not (tmp_path / "out").exists()


def test_an_error_names_the_candidate(auto: Call, made: Path) -> None:
    file = made / f"{MODEL}.safetensors"
    said = auto("-weights", f"{MODEL}={file},{MODEL}@40={file}", code=2).err
    assert f"-weights {MODEL}@40: The model cannot be built:" in said


def test_too_little_time_is_refused_with_the_least(auto: Call, tmp_path: Path) -> None:
    said = auto(limit="0:00:01", code=2).err
    assert "-max_time 0:00:01 is too short" in said
    assert "Give at least 0:00:" in said
    assert list(record(tmp_path / "out")["stages"]) == ["data"]


def test_the_time_of_a_probe_is_that_of_the_images_that_it_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 70,000 training images, 2,500 take part: 15 minutes are enough, and the least that is named is accepted."""
    monkeypatch.setattr("tools.auto.record.BEGAN", time.monotonic() - 250)
    monkeypatch.setattr(search, "_count", lambda _: {"test": 15_000})
    kept = Record(tmp_path, {}, limit=900)
    of_many = search.Search(cast(ToolLine, None), kept, {}, [])
    probe, evaluation = 2500 / 550, of_many._seconds_of_evaluation(speed=550)
    of_many._check_time("a", probe, evaluation)
    kept.limit = 300
    with pytest.raises(UserError, match="Give at least") as refused:
        of_many._check_time("a", probe, evaluation)
    named = re.search(r"at least (\d+):(\d+):(\d+)", f"{refused.value}")
    assert named is not None
    hours, minutes, seconds = map(int, named.groups())
    kept.limit = 3600 * hours + 60 * minutes + seconds
    of_many._check_time("a", probe, evaluation)


def test_no_trial_is_planned_when_the_time_is_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An earlier call had more time."""
    monkeypatch.setattr("tools.auto.record.BEGAN", time.monotonic() - 310)
    kept = Record(tmp_path, {}, 100.0)
    speeds = {name: {"images_per_second": 9.0} for name in "abc"}
    kept.save(candidates=speeds, equal=list("abc"))
    search.Search(cast(ToolLine, None), kept, {}, [])._plan_trials()
    assert kept.content["trials"] == []
    assert kept.content["seconds_per_trial"] == 0


@pytest.mark.parametrize("words", [["DEVICE=CPU"], ["DEVICE=null"], ["-cfg", "cpu.yaml"]])
def test_the_device_chooses_the_models_however_it_is_given(
    in_process: Callable[[Any], Call], made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    def stop(_text: str | None, defaults: tuple[str, ...]) -> None:
        raise UserError(f"asked for {defaults[0]}")

    (tmp_path / "cpu.yaml").write_text(f"BASE: [{ROOT}/configs/finetune.yaml]\nDEVICE: cpu\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(candidates, "find_candidates", stop)
    said = in_process(command.main)(made / "data", "-max_time", "0:01:00", *words, code=2).err
    assert said.endswith(f"asked for {candidates.ON_CPU[0]}\n")


def test_candidates_are_separated_beyond_chance() -> None:
    best = np.arange(100) < 90
    hits = {"equal": np.arange(100) < 88, "worse": np.arange(100) < 70, "best": best}
    equal, words = candidates.separate(hits, ())
    assert equal == ["best", "equal"]
    assert words[0].startswith("equal -2.0 points")
    assert "not told apart" in words[0]
    assert "worse beyond chance" in words[1]
    # Six images are beyond chance (p = 0.03) for one comparison, and not for three.
    six = {"best": best, "six": np.arange(100) < 84}
    assert candidates.separate(six, ())[0] == ["best"]
    equal, words = candidates.separate({**six, "a": best, "b": best}, ())
    assert "six" in equal
    assert any(re.fullmatch(r"six -6\.0 points \(-\S+ to -\S+\), not told apart \(p = 0\.09\)", one) for one in words)


def test_names_of_one_thing_say_what_the_answer_is_about(tmp_path: Path) -> None:
    for number in range(120):
        write_images(tmp_path / "one", images=1, seed=number)
        folder = tmp_path / "data" / CLASSES[number // 4 % 3]
        folder.mkdir(parents=True, exist_ok=True)
        (tmp_path / "one" / "ant" / f"{number}_0.png").rename(folder / f"thing{number // 4}x_{number % 4}.png")
    data = {"DATASET": "imagefolder", "DATA_PATH": f"{tmp_path / 'data'}", "NUM_WORKERS": 0}
    lines = tables.divide(Config().changed(DATA=data, MODEL={"NUM_CLASSES": 3}), tmp_path / "split.csv")
    (names,) = [line for line in lines if "(DATA.GROUP=name)" in line]
    assert "the answer is about new pictures of known things; for new things, give DATA.GROUP" in names
    assert "validation images share" not in names, "these images are divided anew"


def test_another_command_begins_anew_until_probes_have_decided(tmp_path: Path) -> None:
    first = Record(tmp_path, {"weights": "wrong"}, 60.0)
    first.save(stages={"data": []})
    assert Record(tmp_path, {"weights": "right"}, 60.0).content["stages"] == {}
    first.save(stages={"data": [], "probes": []})
    with pytest.raises(UserError, match="has the results of another command"):
        Record(tmp_path, {"weights": "right"}, 60.0)


def test_two_calls_do_not_share_a_folder(auto: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("utils.record.folder_lock.SECONDS_TO_EXIT", 0.1)
    with FolderLock() as lock:
        Record(tmp_path / "out", {}, 60.0, lock)
        assert "in this folder (pid" in auto(code=2).err
    assert not (tmp_path / "out" / "auto.json").exists()


@pytest.mark.parametrize(("right_by_probe", "is_kept"), [(43, False), (58, True)])
def test_a_probe_is_kept_only_if_it_is_better_beyond_chance(tmp_path: Path, right_by_probe: int, is_kept: bool) -> None:
    """Of 75 images, 40 are recognised by the fine-tuned model."""
    images = np.arange(75)
    is_right = images < 40
    kept = Record(tmp_path / "out", {}, 60.0)
    kept.save(candidates={"a": {"trial": "53.33 %", "images_per_second": 9.0}})
    of_probe = images < right_by_probe
    trial = search.Trial(is_right, np.empty(0), of_probe, 8, interval_and_test(is_right, of_probe))
    lines = search.Search(cast(ToolLine, None), kept, {}, [])._decide({"a": trial}, "0:01:00")
    assert record(tmp_path / "out")["fine_tuned"] is not is_kept
    assert lines[-1].endswith("the probe is kept") is is_kept
    assert ("which may be chance; it is fine-tuned" in lines[-1]) is not is_kept


@pytest.mark.parametrize(("right_by_slow", "winner"), [(42, "slow"), (40, "fast"), (38, "fast")])
def test_the_best_of_those_not_told_apart_wins(tmp_path: Path, right_by_slow: int, winner: str) -> None:
    """Of 75 images, the fast candidate recognises 40."""
    images = np.arange(75)
    kept = Record(tmp_path / "out", {}, 60.0)
    kept.save(
        candidates={
            "fast": {"trial": "53.33 %", "images_per_second": 20.0},
            "slow": {"trial": "53.33 %", "images_per_second": 10.0},
        }
    )
    trials = {
        name: search.Trial(images < count, np.empty(0), images < 10, 8, interval_and_test(images < count, images < 10))
        for name, count in (("slow", right_by_slow), ("fast", 40))
    }
    lines = search.Search(cast(ToolLine, None), kept, {}, [])._decide(trials, "0:01:00")
    assert record(tmp_path / "out")["winner"] == winner
    assert ("fast (2.0 times as fast)" in "\n".join(lines)) is (winner == "slow")


@pytest.mark.parametrize("groups", [(), [f"{number // 20}" for number in range(43)]])
def test_each_class_has_an_interval_of_its_recall(groups: list[str]) -> None:
    """Of 20 images each, 19 and 6 are recognised; the images of each class may be one group."""
    label = torch.arange(43) // 20
    guess = torch.where(torch.arange(43).remainder(20) < torch.where(label == 0, 19, 6), label, 1 - label)
    guess[40:] = 0  # the three cats are not recognised, either
    logits = torch.nn.functional.one_hot(guess, 3).float()
    names = SimpleNamespace(
        config=SimpleNamespace(MODEL=SimpleNamespace(NUM_CLASSES=3)), name_of=("ant", "bee", "cat").__getitem__
    )
    trained = cast(Trained, names)
    said = "\n".join(OneLabel.of(trained, [(logits, label)], groups).class_table(trained))
    bee = re.search(r"bee .* 30\.00 % \((\S+) to (\S+)\) .*ant \(14\)", said)
    assert bee is not None
    low, high = map(float, bee.groups())
    assert (high - low > 80) if groups else (low, high) == pytest.approx((14.55, 51.9), abs=0.01)


def test_what_larger_images_bring_is_told_of_one_model() -> None:
    hits = {
        "a": np.arange(100) < 70,
        "b": np.arange(100) < 50,
        "a@96": np.arange(100) < 80,
        "a@96=f": np.ones(100, bool),
    }
    known = {
        "a": candidates.Candidate("a", "w", "", 1),
        "b": candidates.Candidate("b", "w", "", 1),
        "a@96": candidates.Candidate("a", "w", "96", 1),
        "a@96=f": candidates.Candidate("a", "other weights", "96", 1),
    }
    said = candidates.gain_of_sizes(hits, (), known)
    assert [round(one.points, 1) for one in said] == [10.0]
    assert re.search(r"\+10\.0 points \(\+\d\.\d to \+1\d\.\d\) in folds, a@96 against a$", said[0].words)
    assert candidates.gain_of_sizes({"a": hits["a"], "b": hits["b"]}, (), known) == []


@pytest.mark.slow
def test_python_code_gets_the_final_run(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", f"{tmp_path}")
    weights = f"{MODEL}={made / MODEL}.safetensors"
    small = {"device": "cpu", "image_size": 32, "TRAIN.MAX_UPDATES": 8, "DATA.NUM_WORKERS": 0}
    run = vitamp.auto(made / "data", "0:04:00", "~/out", weights=weights, **small)
    assert run.folder == Path(record(tmp_path / "out")["run"])
    one = next((made / "data" / "bee").iterdir())
    assert run.predict(one)[0].guesses[0].name in CLASSES
    with pytest.raises(ValueError, match="has the results of another command"):
        vitamp.auto(made / "data", "0:04:00", tmp_path / "out", weights=weights)
