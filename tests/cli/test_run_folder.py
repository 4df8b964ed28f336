"""The run folder: its files, and where it is created."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from engine.report.curves import draw_curves
from tests.program import Result, Vitamp, metrics, run_program
from utils.config import config_hash, load_config
from vitamp.checkpoints import inspect, verify

FIELDS = {
    "train": {*("epoch", "step", "update", "loss", "acc1", "acc5"), *("lr", "grad_norm", "scale", "skipped")},
    "val": {
        *("epoch", "update"),
        *(
            f"{prefix}{name}"
            for prefix in ("", "ema_")
            for name in ("loss", "acc1", "acc5", "balanced_acc", "macro_f1")
        ),
    },
    "epoch": {"epoch", "update", "loss", "acc1", "acc5"},
    "run": {"epoch", "update", "what"},
    "skip": {
        *("epoch", "update", "operation", "module", "direction", "dtype", "kernel", "parameter"),
        *("samples", "bad_samples", "scale", "passed_over", "reason"),
    },
}


@pytest.fixture(scope="module")
def finished(place: Path) -> tuple[Path, Result]:
    """A finished run with an EMA, made once for this file."""
    words = ("-amp", "fp16", "TRAIN.MODEL_EMA=true", "TAG=night watch")
    result = run_program("-cfg", place / "tiny.yaml", "-output", place / "run", *words, streams=place, code=0)
    return place / "run", result


def test_run_folder_has_all_files(finished: tuple[Path, Result]) -> None:
    run, _ = finished
    made = {str(path.relative_to(run)) for path in run.rglob("*") if path.is_file()}
    boards = {name for name in made if name.startswith("tensorboard/events.out.tfevents.")}
    assert len(boards) == 1
    checkpoints = {
        f"checkpoints/step-{update:09d}/{name}"
        for update in (44, 88)
        for name in ("model.safetensors", "ema.safetensors", "state.pt", "meta.json")
    }
    plain = {
        ".lock",
        "config.yaml",
        "log.txt",
        "ranks/0.log",
        "metrics.jsonl",
        "curves.png",
        "run.json",
        "predictions.safetensors",
    }
    assert made - boards == plain | checkpoints | {"checkpoints/index.json"}


def test_metrics_have_their_fields_and_times_under_perf(finished: tuple[Path, Result]) -> None:
    run, _ = finished
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["event"] for line in lines].count("epoch") == 2
    for line in lines:
        assert set(line) == FIELDS[line["event"]] | {"event", "perf"}, line
    assert {line["what"] for line in lines if line["event"] == "run"} == {"start", "end"}
    train = [line for line in lines if line["event"] == "train"]
    assert [(line["epoch"], line["step"], line["update"]) for line in train] == [
        *((1, step, step) for step in (1, 10, 20, 30, 40, 44)),
        *((2, step, step + 44) for step in (10, 20, 30, 40, 44)),
    ]
    assert train[0]["scale"] == 65536
    assert set(train[0]["perf"]) >= {"images_per_second", "data_wait_percent", "peak_memory_gb"}


def test_curves_and_tensorboard_show_the_run(finished: tuple[Path, Result], tmp_path: Path) -> None:
    run, _ = finished
    assert (run / "curves.png").is_file()
    # Forked runs leave it blank, so it is drawn here from what this one wrote.
    shutil.copy(run / "metrics.jsonl", tmp_path)
    assert draw_curves(tmp_path, "night watch")
    with Image.open(tmp_path / "curves.png") as picture:
        assert picture.format == "PNG"
        assert picture.width > 400
        colours = picture.convert("RGB").getcolors(picture.width * picture.height)
        assert colours is not None
        assert len(colours) > 10, "curves, not a blank picture"
    board = EventAccumulator(str(run / "tensorboard")).Reload()
    assert {"train/loss", "train/lr", "val/acc1", "val/ema_acc1"} <= set(board.Tags()["scalars"])
    shown = [(event.step, event.value) for event in board.Scalars("val/acc1")]
    kept = [(line["update"], line["acc1"]) for line in metrics(run, "val")]
    assert shown == [(update, pytest.approx(value)) for update, value in kept]


def test_run_json_describes_the_run(finished: tuple[Path, Result]) -> None:
    run, _ = finished
    about = json.loads((run / "run.json").read_text())
    assert "-amp fp16" in about["command"]
    assert {"torch", "timm", "python"} <= set(about["versions"])
    assert about["device"].startswith("cpu")
    assert about["choices"]["precision"] == "fp16"
    assert about["tag"] == "night watch"
    assert "git" in about
    assert about["samples"] == {"train": 1437, "val": 360}
    stored = load_file(next(run.glob("checkpoints/*88/model.safetensors")))
    assert about["parameters"] == dict.fromkeys(("all", "trainable"), sum(part.numel() for part in stored.values()))


def test_checkpoints_have_metrics_input_settings_and_hashes(finished: tuple[Path, Result]) -> None:
    run, _ = finished
    index = json.loads((run / "checkpoints" / "index.json").read_text())
    assert index["last"] == "step-000000088"
    figures = {line["update"]: max(line["acc1"], line["ema_acc1"]) for line in metrics(run, "val")}
    assert index["best"] == f"step-{max(figures, key=lambda update: figures[update]):09d}"
    meta: dict[str, Any] = json.loads((run / "checkpoints" / "step-000000044" / "meta.json").read_text())
    assert (meta["epoch"], meta["update"], meta["format"]) == (1, 44, 1)
    first = metrics(run, "val")[0]
    assert meta["metrics"] == {key: first[key] for key in FIELDS["val"] - {"epoch", "update"}}
    assert meta["input"]["image_size"] == 8
    assert (meta["input"]["channels"], meta["input"]["mean"], meta["input"]["std"]) == (1, [0.5], [0.5])
    assert (meta["num_classes"], meta["classes"]) == (10, [str(digit) for digit in range(10)])
    assert meta["config_hash"] == config_hash(load_config(str(run / "config.yaml"), {"OUTPUT": (str(run), "")}).config)
    assert set(meta["files"]) == {"model.safetensors", "ema.safetensors", "state.pt"}
    verify(inspect(run / "checkpoints" / "step-000000044"))


def test_banner_is_printed_and_logged(finished: tuple[Path, Result]) -> None:
    run, result = finished
    for words in (
        *("night watch", "device     cpu:", "precision  fp16 by autocast, with loss scaling", "3,850 parameters"),
        *("1,437 training and 360 validation images", "32 per device x 1 device x 1 accumulated = 32", str(run)),
    ):
        assert words in result.out
    log, rank = (run / "log.txt").read_text(), (run / "ranks" / "0.log").read_text()
    assert log == rank
    assert "fp16 by autocast" in log
    for line in result.out.splitlines():
        assert line in log


def test_save_is_the_parent_folder_and_output_the_run_folder(vitamp: Vitamp, tiny: Path, tmp_path: Path) -> None:
    short = ("-cfg", tiny, "TRAIN.MAX_UPDATES=1")
    for _ in range(2):  # within one second, perhaps: neither may land in the other's folder
        vitamp(*short, f"SAVE={tmp_path / 'all'}", code=0)
    made = sorted((tmp_path / "all").iterdir())
    assert len(made) == 2
    assert all(folder.name.startswith("train-20") and (folder / "run.json").exists() for folder in made)
    vitamp(*short, "-output", tmp_path / "mine", f"SAVE={tmp_path / 'other'}", code=0)
    assert (tmp_path / "mine" / "run.json").exists()
    assert not (tmp_path / "other").exists()


def test_home_is_expanded_in_output(vitamp: Vitamp, tiny: Path, tmp_path: Path) -> None:
    home = {"HOME": str(tmp_path)}
    vitamp("-cfg", tiny, "OUTPUT=~/run", "TRAIN.MAX_UPDATES=1", env=home, code=0)
    vitamp("-resume=~/run", "TRAIN.MAX_UPDATES=2", env=home, code=0)
    assert metrics(tmp_path / "run", "run")[-1]["update"] == 2


def test_keep_last_keeps_the_best(vitamp: Vitamp, tiny: Path, tmp_path: Path) -> None:
    """The best checkpoint comes early, since the learning rate falls to 0 at the end."""
    words = ("SAVE_EVERY_UPDATES=5", "KEEP_LAST=2", "VALIDATE_EVERY_UPDATES=13", "TRAIN.NUM_EPOCHS=1")
    vitamp("-cfg", tiny, "-output", tmp_path / "run", *words, code=0)
    root = tmp_path / "run" / "checkpoints"
    kept = {folder.name for folder in root.glob("step-*")}
    index = json.loads((root / "index.json").read_text())
    newest = {"step-000000040", "step-000000044"}
    assert newest <= kept
    assert kept == newest | {index["best"]}
    figures = {line["update"]: line["acc1"] for line in metrics(tmp_path / "run", "val")}
    assert list(figures) == [13, 26, 39, 44]
    assert index["best"] == f"step-{max(figures, key=lambda update: figures[update]):09d}"


def test_save_and_validate_every_updates_count_the_last_update_of_an_epoch(
    vitamp: Vitamp, tiny: Path, tmp_path: Path
) -> None:
    rarely = ("SAVE_FREQ=100", "VALIDATE_FREQ=100", "TRAIN.NUM_EPOCHS=2", "KEEP_LAST=0")
    often = ("SAVE_EVERY_UPDATES=22", "VALIDATE_EVERY_UPDATES=44")
    vitamp("-cfg", tiny, "-output", tmp_path / "run", *rarely, *often, code=0)
    saved = {int(folder.name.removeprefix("step-")) for folder in (tmp_path / "run" / "checkpoints").glob("step-*")}
    assert saved == {22, 44, 66, 88}
    assert [line["update"] for line in metrics(tmp_path / "run", "val")] == [44, 88]
