"""choose_precision.py: it measures the user's own training, and recommends by the results."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from datasets import Batch, Window
from tests.engine.small import CPU
from tests.program import Result, metrics
from tools.choose_precision import measure as measuring
from tools.choose_precision.examination import Examination
from tools.choose_precision.measure import Job, Measured
from tools.common.precisions import Plan, read_modes
from utils.config import AmpConfig, load_config

UPDATES = 12
REPORT = "choose_precision.json"


def choose(vitamp: Callable[..., Result], *words: object, **options: Any) -> Result:
    return vitamp(*words, script="scripts/choose_precision.py", **options)


@pytest.fixture(scope="module")
def examined(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A complete examination, which several tests read: bf16, and fp16 with a loss scale far too large."""
    from tests.program import TINY_DIGITS, run_program

    root = tmp_path_factory.mktemp("examined")
    cfg = root / "tiny.yaml"
    cfg.write_text(TINY_DIGITS.replace("THREADS: 1", "THREADS: 1\nSEED: 5"), encoding="utf-8")
    words = ["-cfg", cfg, "-updates", UPDATES, "-output", root / "out", "-modes", "fp16,bf16"]
    scale = ["AMP.INIT_LOSS_SCALING=1e30", "AMP.USE_DYNAMIC_LOSS_SCALING=false"]
    result = run_program(*words, *scale, script="scripts/choose_precision.py", streams=root)
    assert result.code == 0, result.text
    return cfg, result, json.loads((root / "out" / REPORT).read_text(encoding="utf-8")), root / "out"


def test_fp32_losses_equal_those_of_training(examined: Any, vitamp: Callable[..., Result], tmp_path: Path) -> None:
    """The baseline has exactly the losses that main_single_gpu.py logs."""
    cfg, _, found, _ = examined
    run = tmp_path / "run"
    done = vitamp("-cfg", cfg, "-output", run, "REPORT_FREQ=1", f"TRAIN.MAX_UPDATES={UPDATES}")
    assert done.code == 0, done.text
    theirs = [line["loss"] for line in metrics(run, "train")]
    ours = found["fp32"]["runs"][0]["losses"]
    assert len(ours) == UPDATES
    assert ours == pytest.approx(theirs, abs=1e-6)


def test_other_seeds_train_on_the_same_samples(examined: Any, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second, third = (run["losses"] for run in examined[2]["fp32"]["runs"])
    assert first[0] != second[0] != third[0]

    batches: list[Batch] = []

    def first_batch(_job: Job, _ready: Any, source: Iterator[Window], *_: Any) -> None:
        batches.append(next(iter(next(source)))[1])

    monkeypatch.setattr(measuring, "_train", first_batch)
    for seed, samples in ((5, None), (6, 5), (6, None)):
        config = load_config(str(tiny), words={"SEED": str(seed), "DATA.SHIFT": "0.1"}).config
        measuring._measure(Job("fp32", config, 1, 0.0, samples), Measured())
    mine, same, other = batches
    assert torch.equal(mine.indices, same.indices)
    assert torch.equal(mine.images, same.images), "augmentation depends on the seed of the samples"
    assert not torch.equal(mine.indices, other.indices)


def test_order_and_seeds_of_the_measurements(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """fp32 first, last and in the middle, on the same samples; on other samples with pretrained weights."""
    jobs: list[Job] = []

    def note(_: Examination, job: Job) -> Measured:
        jobs.append(job)
        return Measured([2.0], 100.0, peak_memory_gb=1.0)

    monkeypatch.setattr(Examination, "_measure", note)
    modes = read_modes("bf16,O2-bf16", AmpConfig(), CPU)
    for words in ({"SEED": "5"}, {"SEED": "5", "MODEL.PRETRAINED": str(tmp_path)}):
        config = load_config(str(tiny), words={**words, "AMP.ENABLED": "true", "AMP.TF32": "true"}).config
        Examination(config, CPU, Plan(modes, {}), 10, 60.0, "choose_precision")._measure_all()
    found = [(job.config.AMP.ENABLED, job.config.AMP.LEVEL, job.config.SEED, job.samples_seed) for job in jobs]
    assert found[:5] == [
        (False, "O1", 5, None),
        (True, "O1", 5, None),
        (False, "O1", 6, 5),
        (True, "O2", 5, None),
        (False, "O1", 7, 5),
    ]
    assert [row[2:] for row in found[5:]] == [(5, None), (5, None), (6, None), (5, None), (7, None)]
    assert not jobs[0].config.AMP.TF32


def test_out_of_memory_is_a_result(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED")

    monkeypatch.setattr(measuring, "start_log", lambda **_: None)
    monkeypatch.setattr(measuring, "_train", full)
    job = Job("fp32", load_config(str(tiny)).config, 1, 0.0)
    assert measuring.measure(job).failed == "out of memory"


def test_too_large_a_loss_scale_is_not_recommended(examined: Any) -> None:
    _, result, found, _ = examined
    fp16 = next(mode for mode in found["modes"] if mode["name"] == "fp16")
    assert fp16["skipped"] == UPDATES
    assert any(f"{UPDATES} of {UPDATES} updates were skipped" in reason for reason in fp16["against"])
    assert any("the loss scale is too large" in note for note in fp16["notes"]), "the first skip is explained"
    assert min(layer["headroom"] for layer in fp16["layers"]) < 1
    assert found["recommendation"]["mode"] != "fp16"
    assert "fp16: not recommended" in result.out


def test_report(examined: Any) -> None:
    _, result, found, folder = examined
    assert (folder / "choose_precision.png").read_bytes().startswith(b"\x89PNG")
    assert {"command", "started", "device", "versions", "seconds", "recommendation", "config"} <= set(found)
    assert "choose_precision.py" in found["command"]
    assert found["device"].startswith("cpu")
    bf16 = next(mode for mode in found["modes"] if mode["name"] == "bf16")
    assert len(bf16["losses"]) == UPDATES
    assert bf16["images_per_second"] > 0
    assert bf16["peak_memory_gb"] > 0.1
    assert {layer["name"] for layer in bf16["layers"]} >= {"patch_embed.proj", "blocks.0.attn.qkv", "head"}
    assert 0 < bf16["difference"] < found["fp32"]["seed_noise"]
    assert result.out.rstrip().splitlines()[-2] == f"Flags: {found['recommendation']['flags']}"
    assert found["recommendation"]["sentence"] in result.out


@pytest.mark.slow
def test_report_notes_that_a_run_would_compile(
    examined: Any, vitamp: Callable[..., Result], tiny: Path, tmp_path: Path
) -> None:
    words = ("-cfg", tiny, "-updates", 10, "-modes", "bf16", "-output", tmp_path / "out", "TRAIN.COMPILE=blocks")
    done = choose(vitamp, *words)
    assert done.code == 0, done.text
    assert "all updates here were eager, but a run would compile fp32, bf16 (TRAIN.COMPILE blocks)" in done.out
    found = json.loads((tmp_path / "out" / REPORT).read_text(encoding="utf-8"))
    assert [mode["compile"] for mode in found["modes"]] == ["blocks"]
    assert "eager" not in examined[1].out


@pytest.mark.slow
def test_budget_cuts_measurements_short(vitamp: Callable[..., Result], tiny: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    words = ("-cfg", tiny, "-updates", 5000, "-budget_min", 0.02, "-modes", "bf16", "-output", out)
    result = choose(vitamp, *words, timeout=100)
    assert result.code == 0, result.text
    assert "cut short (-budget_min)" in result.out
    found = json.loads((out / REPORT).read_text(encoding="utf-8"))
    assert all(10 < len(run["losses"]) < 5000 for run in found["fp32"]["runs"])
    assert found["seconds"] < 60


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("-modes", "bf16,O2_bf16"), "Did you mean O2-bf16?"),
        (("-modes", "tf32"), "Ampere"),
        (("-modes", "NAIVE-bf16", "AMP.FP32_MODULES=head"), "AMP.FP32_MODULES"),
        (("-updates", "2"), "-updates 2"),
        (("-updates", "many"), "whole number"),
        (("-budget_min", "0"), "-budget_min 0"),
        (("-budget_min", "nan"), "-budget_min nan"),
        (("-eval",), "EVAL"),
    ],
)
def test_bad_input_is_refused_before_measuring(
    vitamp: Callable[..., Result], tiny: Path, tmp_path: Path, words: tuple[str, ...], said: str
) -> None:
    result = choose(vitamp, "-cfg", tiny, "-output", tmp_path / "out", *words)
    assert result.code == 2, result.text
    assert said in result.err
    assert "Traceback" not in result.text
    assert not (tmp_path / "out").exists()


def test_existing_report_is_not_overwritten(vitamp: Callable[..., Result], tiny: Path, tmp_path: Path) -> None:
    (tmp_path / REPORT).write_text("mine", encoding="utf-8")
    result = choose(vitamp, "-cfg", tiny, "-output", tmp_path)
    assert result.code == 2, result.text
    assert f"{REPORT} exists" in result.err
    assert (tmp_path / REPORT).read_text(encoding="utf-8") == "mine"
