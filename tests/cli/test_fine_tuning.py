"""Fine-tuning from a run's EMA, with a new classifier, frozen weights and layer-wise learning rates."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from engine.preflight import check
from tests.cli.test_resume import newest
from tests.program import ROOT, TINY_DIGITS, Result, metrics, run_program
from tests.waiting import until
from utils.config import load_config
from utils.errors import UserError

TUNED = [
    *("MODEL.FREEZE=patch_embed,pos_embed,cls_token,blocks.0", "TRAIN.LAYER_DECAY=0.6", "TRAIN.HEAD_LR=3"),
    *("MODEL.RESUME_EMA=true", "MODEL.NEW_CLASSIFIER=true", "SEED=5", "MODEL.DROPOUT=0.1"),
]
PER_EPOCH = 44


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a trained run, `base`, which has an EMA."""
    folder = tmp_path_factory.mktemp("tuning")
    (folder / "tiny.yaml").write_text(TINY_DIGITS.replace("DEPTH: 1", "DEPTH: 2"))
    words = ("TRAIN.NUM_EPOCHS=1", "TRAIN.MODEL_EMA=true")
    done = run_program("-cfg", folder / "tiny.yaml", "-output", folder / "base", *words, streams=folder)
    assert done.code == 0, done.text
    return folder


def last(run: Path, name: str = "model.safetensors") -> dict[str, torch.Tensor]:
    return load_file(sorted((run / "checkpoints").glob("step-*"))[-1] / name)


def command(place: Path, run: Path) -> tuple[object, ...]:
    return ("-cfg", place / "tiny.yaml", "-pretrained", place / "base", "-output", run, "-resume", "auto", *TUNED)


@pytest.mark.slow
def test_stopped_and_resumed_fine_tuning_equals_an_uninterrupted_one(
    vitamp: Callable[..., Result], place: Path, tmp_path: Path
) -> None:
    """One command line throughout: the first start loads the pretrained weights, the next ones resume."""
    begun = vitamp(*command(place, tmp_path / "run"), f"TRAIN.MAX_UPDATES={PER_EPOCH + 9}")
    assert begun.code == 0, begun.text
    assert "ema.safetensors; head left as freshly initialised (MODEL.NEW_CLASSIFIER)" in begun.out
    assert "Parameters: 7,130, trainable 3,482 (48.8 %)" in begun.out
    assert "16 of 32 tensors frozen" in begun.out
    assert "learning rates from 0.0012 to 0.006 (layer decay 0.6, classifier x 3)" in begun.out
    again = vitamp(*command(place, tmp_path / "run"))
    assert again.code == 0, again.text
    assert "the average" not in again.out
    whole = vitamp(*command(place, tmp_path / "whole"))
    assert whole.code == 0, whole.text
    assert metrics(tmp_path / "run", "train") == metrics(tmp_path / "whole", "train")
    ended, expected, began = last(tmp_path / "run"), last(tmp_path / "whole"), last(place / "base", "ema.safetensors")
    for name, tensor in ended.items():
        assert torch.equal(tensor, expected[name]), name
        frozen = name.startswith(("patch_embed", "pos_embed", "cls_token", "blocks.0"))
        assert torch.equal(tensor, began[name]) is frozen, name


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"MODEL.FREEZE": "blocks.3.*"}, "MODEL.FREEZE: 'blocks.3.*' matches no weight"),
        (
            {"MODEL.PRETRAINED": "bare", "MODEL.RESUME_EMA": "true"},
            "MODEL.RESUME_EMA: there is no ema.safetensors beside",
        ),
        ({"MODEL.PRETRAINED": "resnet18.a1_in1k", "MODEL.RESUME_EMA": "true"}, "a timm model, which has no EMA"),
    ],
)
def test_bad_fine_tuning_settings_are_refused_before_the_start(place: Path, words: dict[str, str], said: str) -> None:
    (place / "bare").mkdir(exist_ok=True)
    found = sorted((place / "base" / "checkpoints").glob("step-*"))[-1] / "model.safetensors"
    (place / "bare" / "model.safetensors").write_bytes(found.read_bytes())
    words = {key: str(place / "bare") if value == "bare" else value for key, value in words.items()}
    with pytest.raises(UserError) as error:
        check(load_config(str(place / "tiny.yaml"), words=words).config)
    assert said in str(error.value)


@pytest.mark.parametrize("value", ["0", "1.5", "-0.5", "most"])
def test_layer_decay_must_be_a_fraction(value: str) -> None:
    with pytest.raises(UserError, match=r"TRAIN\.LAYER_DECAY.*number > 0 and <= 1 or null"):
        load_config(None, words={"TRAIN.LAYER_DECAY": value})


@pytest.mark.slow
def test_killed_and_resumed_fine_tuning_equals_an_uninterrupted_one(
    vitamp: Callable[..., Result], place: Path, tmp_path: Path
) -> None:
    words = [*command(place, tmp_path / "run"), "SAVE_EVERY_UPDATES=5", "TRAIN.NUM_EPOCHS=6"]
    with subprocess.Popen([sys.executable, ROOT / "main_single_gpu.py", *words], stdout=subprocess.DEVNULL) as process:
        until(lambda: newest(tmp_path / "run") > PER_EPOCH)
        process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    assert newest(tmp_path / "run") < 6 * PER_EPOCH, "killed too late to show anything"
    done = vitamp(*words)
    assert done.code == 0, done.text
    whole = vitamp(*command(place, tmp_path / "whole"), "SAVE_EVERY_UPDATES=5", "TRAIN.NUM_EPOCHS=6")
    assert whole.code == 0, whole.text
    ended, expected = last(tmp_path / "run"), last(tmp_path / "whole")
    assert all(torch.equal(tensor, expected[name]) for name, tensor in ended.items())


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_fine_tuning_on_two_processes_equals_one(
    vitamp: Callable[..., Result], place: Path, tmp_path: Path, strategy: str
) -> None:
    words = ("-batch_size", 16, "TRAIN.MAX_UPDATES=20", "TRAIN.MODEL_EMA=true", "REPORT_FREQ=1")
    one = vitamp(*command(place, tmp_path / "one"), *words, "-accum_iter", 2)
    assert one.code == 0, one.text
    two = vitamp(
        *command(place, tmp_path / "two"),
        *words,
        *("-ngpus", 2, f"DIST.STRATEGY={strategy}"),
        script="main_multi_gpu.py",
    )
    assert two.code == 0, two.text
    alone, both = (metrics(tmp_path / name, "train") for name in ("one", "two"))
    if strategy == "ddp":
        assert alone == both
        return
    assert [line["loss"] for line in both] == pytest.approx([line["loss"] for line in alone], rel=1e-5)
    thawed = vitamp(
        *command(place, tmp_path / "two"),
        *words,
        *("-ngpus", 2, "DIST.STRATEGY=fsdp", "MODEL.FREEZE=null", "TRAIN.MAX_UPDATES=25"),
        script="main_multi_gpu.py",
    )
    assert thawed.code == 0, thawed.text
    assert "trained from now on (MODEL.FREEZE): 16 tensors" in thawed.out
