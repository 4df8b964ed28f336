"""Fine-tuning from a run's EMA, with a new classifier, frozen weights and layer-wise learning rates."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from engine.preflight import check
from tests.program import TINY_DIGITS, Result, metrics, run_program
from utils.config import load_config
from utils.errors import UserError

TUNED = [
    *("MODEL.FREEZE=patch_embed,pos_embed,cls_token,blocks.0", "TRAIN.LAYER_DECAY=0.6", "TRAIN.HEAD_LR=3"),
    *("MODEL.RESUME_EMA=true", "MODEL.NEW_CLASSIFIER=true", "SEED=5", "MODEL.DROPOUT=0.1"),
]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a trained run, `base`, which has an EMA."""
    folder = tmp_path_factory.mktemp("tuning")
    (folder / "tiny.yaml").write_text(TINY_DIGITS.replace("DEPTH: 1", "DEPTH: 2"))
    words = ("TRAIN.NUM_EPOCHS=1", "TRAIN.MODEL_EMA=true")
    done = run_program("-cfg", folder / "tiny.yaml", "-output", folder / "base", *words, streams=folder)
    assert done.code == 0, done.text
    return folder


def command(place: Path, run: Path) -> tuple[object, ...]:
    return ("-cfg", place / "tiny.yaml", "-pretrained", place / "base", "-output", run, "-resume", "auto", *TUNED)


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
def test_sharded_fine_tuning_equals_one_process_and_may_be_thawed(
    vitamp: Callable[..., Result], place: Path, tmp_path: Path
) -> None:
    words = ("-batch_size", 16, "TRAIN.MODEL_EMA=true", "REPORT_FREQ=1")
    one = vitamp(*command(place, tmp_path / "one"), *words, "TRAIN.MAX_UPDATES=20", "-accum_iter", 2)
    assert one.code == 0, one.text
    sharded = (*command(place, tmp_path / "two"), *words, "-ngpus", 2, "DIST.STRATEGY=fsdp")
    two = vitamp(*sharded, "TRAIN.MAX_UPDATES=20", script="main_multi_gpu.py")
    assert two.code == 0, two.text
    alone, both = ([line["loss"] for line in metrics(tmp_path / name, "train")] for name in ("one", "two"))
    assert both == pytest.approx(alone, rel=1e-5)
    thawed = vitamp(*sharded, "MODEL.FREEZE=null", "TRAIN.MAX_UPDATES=25", script="main_multi_gpu.py")
    assert thawed.code == 0, thawed.text
    assert "trained from now on (MODEL.FREEZE): 16 tensors" in thawed.out
