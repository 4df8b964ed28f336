"""NaN gradients stop a run without a loss scaler, before bad weights are saved."""

import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.program import Vitamp, metrics

TOO_FAST = ("TRAIN.BASE_LR=1e30", "TRAIN.WARMUP_EPOCHS=0", "TRAIN.GRAD_CLIP=null", "SAVE_EVERY_UPDATES=1")


@pytest.mark.parametrize("how", [("REPORT_FREQ=1",), ("REPORT_FREQ=1000",), ("-amp", "bf16", "REPORT_FREQ=1")])
def test_diverging_run_stops(vitamp: Vitamp, tiny: Path, tmp_path: Path, how: tuple[str, ...]) -> None:
    run = tmp_path / "run"
    done = vitamp("-cfg", tiny, "-output", run, *TOO_FAST, *how, code=1)
    assert done.err.count("error:") == 1
    told = re.search(r"at update (\d+) \(epoch 1, step (\d+); learning rate 9\.\d+e\+29\)", done.err)
    assert told, done.err
    assert told[1] == told[2]
    for advice in ("TRAIN.BASE_LR", "TRAIN.WARMUP_EPOCHS", "TRAIN.GRAD_CLIP"):
        assert advice in done.err
    assert ("-amp off" in done.err) == ("-amp" in how)
    last = max(path.name for path in (run / "checkpoints").glob("step-*"))
    assert f"The last checkpoint is {last}; resume from it with -resume." in done.err
    assert all(line["what"] != "end" for line in metrics(run, "run"))
    for weights in run.rglob("*.safetensors"):
        assert all(torch.isfinite(tensor).all() for tensor in load_file(weights).values()), weights
    assert not [path for path in run.rglob("*") if path.name.startswith(".tmp")]


@pytest.mark.parametrize("when", [("VALIDATE_EVERY_UPDATES=10",), ("TRAIN.MAX_UPDATES=10",)])
def test_diverged_run_stops_before_it_validates(
    vitamp: Vitamp, tiny: Path, tmp_path: Path, when: tuple[str, ...]
) -> None:
    done = vitamp("-cfg", tiny, "-output", tmp_path / "run", *TOO_FAST[:3], "REPORT_FREQ=1000", *when, code=1)
    assert "the gradients became NaN or infinite at update" in done.err
    assert "Validation" not in done.out
    assert metrics(tmp_path / "run", "val") == []


def test_an_evaluation_of_nan_says_so(vitamp: Vitamp, tiny: Path, tmp_path: Path) -> None:
    vitamp("-cfg", tiny, "-output", tmp_path / "run", "TRAIN.MAX_UPDATES=1", code=0)
    weights = load_file(next((tmp_path / "run" / "checkpoints").glob("step-*/model.safetensors")))
    next(iter(weights.values())).fill_(torch.nan)
    save_file(weights, tmp_path / "nan.safetensors")
    words = ("-cfg", tiny, "-eval", "-pretrained", tmp_path / "nan.safetensors", "-output", tmp_path / "eval")
    assert "are NaN or infinite, so that no metric means anything" in vitamp(*words, code=0).err
