"""Abilities through the command line: a run that is resumed, or trained by two processes, equals a whole one.

tests/faults kills runs, tests/cli/test_resume.py has more ways to resume, tests/ddp more processes.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.label_sets import write_recipe, write_set
from tests.program import Vitamp, last_weights, metrics, run_program


class Ability(NamedTuple):
    """Words of the command line, and what the log says of them."""

    words: tuple[str, ...]
    log: tuple[str, ...]
    images: int = 1437


COMMON = (
    *("TRAIN.NUM_EPOCHS=3", "DATA.BATCH_SIZE=16", "REPORT_FREQ=5", "MODEL.DROPOUT=0.1", "MODEL.DEPTH=2"),
    *("TRAIN.MODEL_EMA=true", "DATA.SHIFT=0.1"),
)
BATCH = 32
O2 = ("-amp", "bf16", "AMP.LEVEL=O2")
ABILITIES = {
    "muon": Ability(
        ("TRAIN.OPTIMIZER.NAME=muon", "TRAIN.LAYER_DECAY=0.7", *O2),
        ("optimiser  Muon 8 tensors (6,144 parameters), 5 Newton-Schulz steps in bf16; AdamW 24 tensors",),
    ),
    "balanced classes": Ability(
        ("DATA.SAMPLER=balanced", "TRAIN.CLASS_WEIGHTS=balanced"),
        (
            "sampler balanced: up to 144 images of each of 10 classes per epoch, each image at most 2 times",
            "class weights balanced: 0.98",
            "in the training loss only; best checkpoint by top-1 (SAVE_BEST_BY=balanced_acc weighs classes alike",
        ),
    ),
    "bce": Ability(
        (
            *("TRAIN.LOSS=bce", "TRAIN.BCE_TARGET_THRESH=0", "TRAIN.MIXUP_ALPHA=0.8", "TRAIN.CUTMIX_ALPHA=1.0"),
            *("TRAIN.RANDOM_ERASE_PROB=0.5", "DATA.REPEATED_AUGMENT=3"),
        ),
        ("; loss bce, mean over classes, targets above 0 count as 1",),
    ),
    "distillation": Ability(
        (
            *("TRAIN.DISTILLATION_TYPE=soft", "-teacher_model", "{digits_run}", "REPORT_STAGES=true"),
            *("MODEL.NAME=deit_tiny_distilled_patch16_224", "MODEL.DEPTH=1", "-amp", "bf16"),
        ),
        ("  teacher    tiny of ",),
    ),
    "recomputed blocks": Ability(("TRAIN.GRAD_CHECKPOINT=blocks",), ()),
    "fewer patches and growing images": Ability(
        (
            *("TRAIN.TOKEN_DROP=0.5", "TRAIN.TOKEN_DROP_TAIL=1", "TRAIN.SIZE_SCHEDULE=[[0,8],[1,16]]"),
            "DATA.IMAGE_SIZE=16",
        ),
        (
            "50 % of the patches left out, none in the last epoch; images of 8 from epoch 1, 16 from epoch 2",
            *(f", Patches left out: {what}\n" for what in ("50%, Size: 8", "50%, Size: 16", "0%, Size: 16")),
        ),
    ),
    "fine-tuning": Ability(
        (
            *("-pretrained", "{digits_run}", "MODEL.NEW_CLASSIFIER=true", "MODEL.DEPTH=1"),
            *("MODEL.FREEZE=patch_embed,pos_embed,cls_token", "TRAIN.LAYER_DECAY=0.6", *O2),
        ),
        (
            "safetensors; head left as freshly initialised (MODEL.NEW_CLASSIFIER)",
            "4 of 20 tensors frozen",
            "(layer decay 0.6)",
        ),
    ),
    "adapters": Ability(
        (
            *("-pretrained", "{digits_run}", "MODEL.DEPTH=1", "MODEL.LORA.RANK=2", "MODEL.LORA.ALPHA=6"),
            *("MODEL.LORA.TARGETS=q,v,fc1", "MODEL.DROPPATH=0.1", "-amp", "bf16"),
        ),
        ("LoRA of rank 2, alpha 6, on q, v, fc1 in 2 layers",),
    ),
    "without labels": Ability(
        (
            *("-mae_pretrain", "MODEL.PATCH_SIZE=2", "MODEL.DECODER.EMBED_DIM=16", "MODEL.DECODER.DEPTH=1"),
            *("MODEL.DECODER.NUM_HEADS=2", "MODEL.DROPOUT=0", "-amp", "bf16"),
        ),
        ("no labels",),
    ),
    "several labels": Ability(
        ("TRAIN.MIXUP_ALPHA=0.2", "TRAIN.SMOOTHING=0.02", "DATA.SHIFT=0"),
        ("160 training and 61 validation images of 16 x 16 x 1, 4 classes, several labels per image",),
        images=160,
    ),
}


def cases(fast: tuple[str, ...]) -> list[Any]:
    return [pytest.param(name, marks=() if name in fast else pytest.mark.slow) for name in ABILITIES]


@pytest.fixture(scope="module")
def command(place: Path, digits_run: Path) -> Callable[[str], list[object]]:
    write_set(place / "labels")
    recipes = {"several labels": write_recipe(place / "labels")}

    def words(name: str) -> list[object]:
        given = [word.format(digits_run=digits_run) for word in ABILITIES[name].words]
        return ["-cfg", recipes.get(name, place / "tiny.yaml"), *COMMON, *given]

    return words


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, command: Callable[[str], list[object]]) -> Callable[[str], Path]:
    """An uninterrupted run of one process, made once for each ability."""
    made: dict[str, Path] = {}

    def run(name: str) -> Path:
        if name not in made:
            place = tmp_path_factory.mktemp("whole")
            run_program(*command(name), "-accum_iter", 2, "-output", place / "run", streams=place, timeout=300, code=0)
            made[name] = place / "run"
        return made[name]

    return run


def trained(run: Path) -> dict[str, Any]:
    """What must be equal, bit for bit."""
    return {**last_weights(run), "metrics": [line for line in metrics(run) if line["event"] in ("train", "epoch")]}


def validated(run: Path) -> dict[str, Any]:
    meta = json.loads((max((run / "checkpoints").glob("step-*")) / "meta.json").read_text(encoding="utf-8"))
    return {key: meta.get(key) for key in ("metrics", "thresholds")}


@pytest.mark.parametrize("name", ABILITIES)
def test_log_names_the_ability(name: str, whole: Callable[[str], Path]) -> None:
    log = (whole(name) / "log.txt").read_text(encoding="utf-8")
    assert [words for words in ABILITIES[name].log if words not in log] == []
    losses = [line["loss"] for line in metrics(whole(name), "epoch")]
    assert losses[-1] < losses[0]


def test_train_lines_say_the_size_and_what_is_left_out_in_each_epoch(whole: Callable[[str], Path]) -> None:
    lines = metrics(whole("fewer patches and growing images"), "train")
    shown = {(line["epoch"], line["image_size"], line["token_drop"]) for line in lines}
    assert shown == {(1, 8, 0.5), (2, 16, 0.5), (3, 16, 0.0)}


@pytest.mark.parametrize(
    "name", cases(fast=("balanced classes", "bce", "fewer patches and growing images", "adapters", "without labels"))
)
@pytest.mark.parametrize("epochs", [1.2, pytest.param(0.8, marks=pytest.mark.slow)])
def test_stopped_and_resumed_run_equals_a_whole_one(
    vitamp: Vitamp,
    tmp_path: Path,
    command: Callable[[str], list[object]],
    whole: Callable[[str], Path],
    name: str,
    epochs: float,
) -> None:
    """Stopped within the second epoch, or within the first, before images grow."""
    words = (*command(name), "-accum_iter", 2, "-output", tmp_path / "run", "-resume", "auto")
    stop = int(epochs * ABILITIES[name].images / BATCH)
    vitamp(*words, f"TRAIN.MAX_UPDATES={stop}", timeout=300, code=0)
    assert metrics(tmp_path / "run", "run")[-1]["update"] == stop
    vitamp(*words, timeout=300, code=0)
    assert trained(tmp_path / "run") == trained(whole(name))
    assert validated(tmp_path / "run") == validated(whole(name))


@pytest.mark.parametrize("name", cases(fast=("bce", "several labels", "adapters")))
def test_two_processes_equal_one_that_accumulates(
    vitamp: Vitamp, tmp_path: Path, command: Callable[[str], list[object]], whole: Callable[[str], Path], name: str
) -> None:
    """Training bit for bit; validation, whose batches have other shapes on two processes, to rounding."""
    words = (*command(name), "-ngpus", 2, "-output", tmp_path / "run")
    vitamp(*words, script="main_multi_gpu.py", timeout=300, code=0)
    assert trained(tmp_path / "run") == trained(whole(name))
    ours, theirs = (
        {key: value for key, value in validated(run)["metrics"].items() if isinstance(value, float)}
        for run in (tmp_path / "run", whole(name))
    )
    assert ours == pytest.approx(theirs, rel=1e-3)
