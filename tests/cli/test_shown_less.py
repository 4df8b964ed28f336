"""Token dropping and growing images from the command line: log, refusals, and resumed runs."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.program import TINY_DIGITS, Result, metrics, run_program
from utils.config import load_config
from utils.errors import UserError

BOTH = [
    *("TRAIN.TOKEN_DROP=0.5", "TRAIN.TOKEN_DROP_TAIL=1", "TRAIN.SIZE_SCHEDULE=[[0,8],[0.5,16]]", "DATA.IMAGE_SIZE=16"),
    *("DATA.SHIFT=0.1", "MODEL.DROPOUT=0.1", "TRAIN.MODEL_EMA=true", "TRAIN.NUM_EPOCHS=4", "REPORT_FREQ=1"),
]
PER_EPOCH = 44


def told(run: Path) -> list[dict[str, object]]:
    return [line for line in metrics(run) if line["event"] in ("train", "epoch")]


def weights(run: Path) -> list[bytes]:
    folder = run / "checkpoints" / f"step-{4 * PER_EPOCH:09d}"
    return [(folder / name).read_bytes() for name in ("model.safetensors", "ema.safetensors")]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Result]:
    place = tmp_path_factory.mktemp("whole")
    (place / "tiny.yaml").write_text(TINY_DIGITS, encoding="utf-8")
    done = run_program("-cfg", place / "tiny.yaml", "-output", place / "run", *BOTH, streams=place, timeout=300)
    assert done.code == 0, done.text
    return place / "run", done


def test_log_describes_token_drop_and_size_schedule(whole: tuple[Path, Result]) -> None:
    words = "50 % of the patches left out, none in the last epoch; images of 8 from epoch 1, 16 from epoch 3"
    assert words in whole[1].out


def test_train_lines_say_the_size_and_what_is_left_out_in_each_epoch(whole: tuple[Path, Result]) -> None:
    shown = {(line["epoch"], line["image_size"], line["token_drop"]) for line in told(whole[0]) if "lr" in line}
    assert shown == {(1, 8, 0.5), (2, 8, 0.5), (3, 16, 0.5), (4, 16, 0.0)}
    steps = (line for line in whole[1].out.splitlines() if "Step[" in line)
    ends = {line.partition(", Patches")[2] for line in steps}
    assert ends == {" left out: 50%, Size: 8", " left out: 50%, Size: 16", " left out: 0%, Size: 16"}


# Within small images and dropped tokens, where images grow, and within the epoch that shows all.
@pytest.mark.parametrize(
    "stop",
    [
        PER_EPOCH + 9,
        pytest.param(2 * PER_EPOCH, marks=pytest.mark.slow),
        pytest.param(3 * PER_EPOCH + 5, marks=pytest.mark.slow),
    ],
)
def test_stopped_and_resumed_run_equals_an_uninterrupted_one(
    vitamp: Callable[..., Result], tiny: Path, tmp_path: Path, whole: tuple[Path, Result], stop: int
) -> None:
    run = tmp_path / "run"
    first = vitamp("-cfg", tiny, "-output", run, *BOTH, f"TRAIN.MAX_UPDATES={stop}", timeout=300)
    assert first.code == 0, first.text
    again = vitamp("-cfg", tiny, "-output", run, *BOTH, "-resume", "auto", timeout=300)
    assert again.code == 0, again.text
    assert told(run) == told(whole[0])
    assert weights(run) == weights(whole[0])


@pytest.mark.slow
def test_two_processes_drop_the_same_tokens_as_one(
    vitamp: Callable[..., Result], tiny: Path, tmp_path: Path, whole: tuple[Path, Result]
) -> None:
    """The dropped tokens depend on the position of a micro-batch in the run, not on its rank."""
    runs = {"one": ("main_single_gpu.py", "TRAIN.ACCUM_ITER=2"), "two": ("main_multi_gpu.py", "-ngpus=2")}
    for name, (script, word) in runs.items():
        words = [*BOTH, word, "TRAIN.MAX_UPDATES=50", "DATA.BATCH_SIZE=16"]
        done = vitamp("-cfg", tiny, "-output", tmp_path / name, *words, script=script, timeout=300)
        assert done.code == 0, done.text
    assert told(tmp_path / "one") == told(tmp_path / "two")
    assert told(tmp_path / "one") != told(whole[0])[: len(told(tmp_path / "one"))]


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        (["TRAIN.TOKEN_DROP=1"], "TRAIN.TOKEN_DROP: expected number >= 0 and < 1, got 1"),
        (["TRAIN.TOKEN_DROP=-0.1"], "TRAIN.TOKEN_DROP: expected number >= 0 and < 1, got -0.1"),
        (["TRAIN.TOKEN_DROP=0.5", "TRAIN.TOKEN_DROP_TAIL=2"], "TRAIN.TOKEN_DROP_TAIL: 2 leaves no epoch"),
        (["TRAIN.SIZE_SCHEDULE=[[0,6],[0.5,8]]"], "TRAIN.SIZE_SCHEDULE: [6]: not divisible by MODEL.PATCH_SIZE 4"),
        (["TRAIN.SIZE_SCHEDULE=[[0.1,4],[0.5,8]]"], "the first start must be 0"),
        (["TRAIN.SIZE_SCHEDULE=[[0,4],[2,8]]"], "below TRAIN.NUM_EPOCHS 2"),
        (["TRAIN.SIZE_SCHEDULE=[[0,4],[0,8]]"], "each later start above the previous one"),
        (["TRAIN.SIZE_SCHEDULE=[[0,4]]"], "ends with size 4; it must end with DATA.IMAGE_SIZE 8"),
        (["TRAIN.SIZE_SCHEDULE=[[0,4,8]]"], "list of lists of two numbers"),
        (["TRAIN.SIZE_SCHEDULE=4"], "list of lists of two numbers"),
    ],
)
def test_invalid_settings_are_refused(tiny: Path, words: list[str], answer: str) -> None:
    with pytest.raises(UserError, match=re.escape(answer)):
        load_config(str(tiny), words=dict(word.split("=", 1) for word in words))


def test_unsupported_models_are_refused(vitamp: Callable[..., Result], tmp_path: Path) -> None:
    recipe = tmp_path / "swin.yaml"
    recipe.write_text(
        "DATA: {DATASET: synthetic}\nMODEL: {TYPE: swin, NAME: swin_tiny_patch4_window7_224}\n"
        "TRAIN: {NUM_EPOCHS: 2, WARMUP_EPOCHS: 0}\nDEVICE: cpu\n",
        encoding="utf-8",
    )
    done = vitamp("-cfg", recipe, "-dry_run", "TRAIN.TOKEN_DROP=0.5", "TRAIN.SIZE_SCHEDULE=[[0,112],[0.5,224]]")
    assert done.code == 2, done.text
    for key in ("TRAIN.TOKEN_DROP", "TRAIN.SIZE_SCHEDULE"):
        assert f"{key}: SwinTransformer does not support it" in done.err
