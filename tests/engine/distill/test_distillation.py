"""Distillation: DeiT's loss, a frozen teacher that gets the student's images, and reproducible runs."""

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from timm.models.deit import VisionTransformerDistilled
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn
from torch.optim import AdamW

from engine.amp.overflow import OverflowWatch
from engine.amp.precision import Precision
from engine.distill import teacher as teachers
from engine.distill.teacher import Distillation, Teacher, check_teacher_matches, load_teacher
from engine.inputs.mixing import build_batch_transform
from engine.optim.ema import Ema
from engine.preflight import fill_in
from engine.setup import ReadyToTrain
from engine.task.one import OneLabel
from tests.engine.small import CPU, build, train, windows
from tests.program import Vitamp, metrics
from tests.refused import refusal
from utils.config import TrainConfig, load_config
from utils.errors import UserError
from utils.seeding import seed_all

DISTILLED = {"MODEL__NAME": "deit_tiny_distilled_patch16_224"}
"""Without MODEL.TYPE, which would set the augmentation of its model family."""
MIXED = {"TRAIN__MIXUP_ALPHA": 0.8, "TRAIN__CUTMIX_ALPHA": 1.0, "TRAIN__RANDOM_ERASE_PROB": 0.5}
UPDATES = 5
Words = dict[str, Any]
Student = Callable[..., ReadyToTrain]


@pytest.fixture
def student(tiny: Path, teacher_run: Path) -> Student:
    def made(kind: str = "hard", **words: object) -> ReadyToTrain:
        given = {"TRAIN__DISTILLATION_TYPE": kind, "TRAIN__TEACHER_MODEL": teacher_run}
        return build(tiny, **{**given, **words})

    return made


def teacher_in(ready: ReadyToTrain) -> Teacher:
    taught = ready.parts.callback(Distillation)
    assert taught is not None
    return taught.teacher


def weights_of(run: Path) -> dict[str, Tensor]:
    index = json.loads((run / "checkpoints" / "index.json").read_text())
    return load_file(run / "checkpoints" / index["best"] / "model.safetensors")


def losses_of(ready: ReadyToTrain, updates: int = UPDATES) -> list[float]:
    source, losses = windows(ready), []
    for done in range(updates):
        train(ready, 1, source, done)
        losses.append(ready.parts.meters.read(torch.ones(()), 0.0).update.loss)
    return losses


SIZES: Words = {"img_size": 8, "patch_size": 4, "in_chans": 1, "num_classes": 10}
SIZES |= {"embed_dim": 16, "depth": 1, "num_heads": 2}
CONSTANT = {"TRAIN__WARMUP_EPOCHS": 0, "TRAIN__LR_SCHEDULER__NAME": "step", "TRAIN__WEIGHT_DECAY": 0}
CONSTANT |= {"TRAIN__GRAD_CLIP": "null", "TRAIN__SMOOTHING": 0.1}


def plain_losses(ready: ReadyToTrain, run: Path, mixing: Words, kind: str, alpha: float, tau: float):
    """Losses of a plain training loop: timm's models, torch's AdamW, DeiT's loss."""
    start = ready.parts.model.state_dict()
    two = "dist_token" in start
    student = (VisionTransformerDistilled if two else VisionTransformer)(**SIZES).train()
    student.load_state_dict(start)
    if isinstance(student, VisionTransformerDistilled):
        student.set_distilled_training(True)
    teacher = VisionTransformer(**SIZES).eval()
    teacher.load_state_dict(weights_of(run))
    train_config = TrainConfig.model_validate({key.removeprefix("TRAIN__"): value for key, value in mixing.items()})
    change = build_batch_transform(train_config, OneLabel(10), CPU)
    optimizer = AdamW(student.parameters(), lr=2e-3, weight_decay=0.0)
    losses = []
    for update, window in enumerate(itertools.islice(windows(ready), UPDATES), start=1):
        ((share, batch),) = window
        seed_all(0, "micro", update, share.number)
        seen = change((batch.images.float() / 255 - 0.5) / 0.5, batch.labels)
        answers = student(seen.images)
        by_labels, by_teacher = answers if two else (answers, answers)
        with torch.no_grad():
            answer = teacher(seen.images)
        taught = F.cross_entropy(by_teacher, answer.argmax(1))
        if kind == "soft":
            own, theirs = F.log_softmax(by_teacher / tau, 1), F.softmax(answer / tau, 1)
            taught = (theirs * (theirs.log() - own)).sum(1).mean() * tau**2
        loss = (1 - alpha) * F.cross_entropy(by_labels, seen.targets, label_smoothing=0.1) + alpha * taught
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("mixing", [{}, MIXED], ids=["plain", "mixed"])
@pytest.mark.parametrize("heads", [{}, DISTILLED], ids=["one", "two"])
@pytest.mark.parametrize(("kind", "alpha", "tau"), [("hard", 0.5, 1.0), ("soft", 0.3, 3.0)])
def test_distillation_loss_equals_plain_loop(
    student: Student, teacher_run: Path, kind: str, alpha: float, tau: float, heads: Words, mixing: Words
) -> None:
    words = {"TRAIN__DISTILLATION_ALPHA": alpha, "TRAIN__DISTILLATION_TAU": tau, **CONSTANT, **heads, **mixing}
    plain = plain_losses(student(kind, **words), teacher_run, mixing, kind, alpha, tau)
    ours = losses_of(student(kind, **words))
    assert max(abs(a - b) for a, b in zip(ours, plain, strict=True)) < 1e-6
    assert len(set(ours)) == UPDATES


def test_teacher_is_frozen_and_neither_trained_nor_saved(student: Student, teacher_run: Path) -> None:
    ready = student("soft", TRAIN__MODEL_EMA="true", **DISTILLED)
    teacher = teacher_in(ready)
    losses_of(ready)
    saved = weights_of(teacher_run)
    assert all(torch.equal(value, saved[name]) for name, value in teacher.model.state_dict().items())
    assert not any(part.training for part in teacher.model.modules())
    trained = {id(weight) for group in ready.parts.optimizer.param_groups for weight in group["params"]}
    assert trained == {id(weight) for weight in ready.parts.model.parameters()}
    ema = ready.parts.callback(Ema)
    assert ema is not None
    assert ema.module.state_dict().keys() == ready.parts.model.state_dict().keys()
    assert not any("teacher" in name for name in ready.parts.model.state_dict())
    assert ready.choices["teacher"].startswith("tiny of ")


def test_teacher_gets_images_in_its_own_size_and_normalisation(tiny: Path, tmp_path: Path) -> None:
    """The teacher has another image size, mean and standard deviation."""
    whole = timm.create_model("test_vit.r160_in1k", num_classes=10, in_chans=1)
    save_file(whole.state_dict(), tmp_path / "weights.safetensors")
    wanted = f"test_vit.r160_in1k={tmp_path / 'weights.safetensors'}"
    own = {"DATA__IMAGENET_MEAN": 0.3, "DATA__IMAGENET_STD": 0.2}
    ready = build(tiny, TRAIN__DISTILLATION_TYPE="hard", TRAIN__TEACHER_MODEL=wanted, **own)
    teacher, known = teacher_in(ready), timm.get_pretrained_cfg("test_vit.r160_in1k")
    assert known is not None
    assert teacher.source.image_size == 160
    pixels = torch.rand(4, 1, 8, 8)
    large = F.interpolate(pixels, size=(160, 160), mode="bicubic", antialias=True)
    mean, std = sum(known.mean) / 3, sum(known.std) / 3
    expected = whole.eval()((large - mean) / std)
    assert torch.allclose(teacher((pixels - 0.3) / 0.2), expected, atol=2e-4)
    assert expected.std() > 1e-3
    tagged = tmp_path / "tf_efficientnet_b0_ap.safetensors"  # the former name of a tag with another mean
    save_file(timm.create_model("tf_efficientnet_b0", num_classes=10, in_chans=1).state_dict(), tagged)
    ready = build(tiny, TRAIN__DISTILLATION_TYPE="hard", TRAIN__TEACHER_MODEL=tagged)
    assert teacher_in(ready).source.mean == (0.5,)


@pytest.mark.parametrize("level", ["O1", "O2", "NAIVE"])
def test_teacher_computes_in_the_precision_of_the_run(student: Student, level: str) -> None:
    ready = student(AMP__ENABLED="true", AMP__DTYPE="bf16", AMP__LEVEL=level)
    teacher, seen = teacher_in(ready), []
    layer: nn.Module = next(part for part in teacher.model.modules() if isinstance(part, nn.Linear))
    layer.register_forward_hook(lambda *call: seen.append(call[2].dtype))
    losses_of(ready, 2)
    assert set(seen) == {torch.bfloat16}
    assert {weight.dtype for weight in teacher.model.parameters()} == {torch.float32}


@pytest.mark.parametrize("scale", [1e38, 1])
def test_overflow_is_replayed_with_the_teacher_and_named_where_it_is_its_own(student: Student, scale: float) -> None:
    ready = student("soft", AMP__ENABLED="true", AMP__DTYPE="fp16", AMP__INIT_LOSS_SCALING=scale, **DISTILLED)
    if scale == 1:
        teacher_in(ready).model.get_parameter("blocks.0.mlp.fc2.weight").fill_(1e5)
    losses_of(ready, 1)
    watch = ready.parts.callback(OverflowWatch)
    assert watch is not None
    (blame,) = watch.take()
    assert blame.operation, blame.words()
    assert "replay failed" not in blame.words()
    assert (blame.module == "teacher.blocks.0.mlp.fc2") is (scale == 1)


def refused(student: Student, **words: object) -> str:
    said = refusal(lambda: student(**words))
    assert said.startswith("TRAIN.TEACHER_MODEL")
    return said


def test_unusable_teacher_is_refused(student: Student, tmp_path: Path) -> None:
    small = timm.create_model("test_vit.r160_in1k", num_classes=7, in_chans=1)
    headless = {name: value for name, value in small.state_dict().items() if not name.startswith("head.")}
    for name, weights in {"seven": small.state_dict(), "headless": headless}.items():
        save_file(weights, tmp_path / f"{name}.safetensors")
        text = refused(student, TRAIN__TEACHER_MODEL=f"test_vit.r160_in1k={tmp_path / name}.safetensors")
        assert "10 classes" in text
    assert "NAME=FILE" in refused(student, TRAIN__TEACHER_MODEL=tmp_path / "seven.safetensors")
    assert "test_vit.r160_in1k=: no file after the =" in refused(student, TRAIN__TEACHER_MODEL="test_vit.r160_in1k=")
    assert "Did you mean" in refused(student, TRAIN__TEACHER_MODEL="regnety_16")
    assert "regnety_160.deit_in1k" in refused(student, TRAIN__TEACHER_MODEL="./regnety_160.pdparams")


def test_deit_learns_from_paddlevits_teacher_unless_another_is_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    def chosen(kind: str = "deit", **words: str) -> tuple[str | None, str]:
        given = {"DATA.DATASET": "digits", "TRAIN.DISTILLATION_TYPE": "hard", "MODEL.TYPE": kind, **words}
        loaded = fill_in(load_config(words=given))
        return loaded.config.TRAIN.TEACHER_MODEL, loaded.notes[-1] if loaded.notes else ""

    note = "TRAIN.TEACHER_MODEL regnety_160.deit_in1k: PaddleViT's default teacher for MODEL.TYPE deit"
    assert chosen() == ("regnety_160.deit_in1k", note)
    assert chosen(**{"TRAIN.TEACHER_MODEL": "resnet50"})[0] == "resnet50"
    assert chosen("vit")[0] is chosen(EVAL="true")[0] is None
    (tmp_path / "regnety_160.pdparams").touch()
    assert chosen("levit", **{"MODEL.NAME": "levit_128s"})[0] == "regnety_160.pdparams"


def test_file_without_a_name_is_of_paddlevits_teacher(
    student: Student, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A small model stands for RegNetY-160 here. MODEL.TYPE deit changes only what is tried."""
    monkeypatch.setattr(teachers, "PADDLEVIT", "test_vit.r160_in1k")
    whole = timm.create_model("test_vit.r160_in1k", num_classes=10, in_chans=1).state_dict()
    save_file(whole, tmp_path / "weights.safetensors")
    words = {"MODEL__TYPE": "deit", **DISTILLED, "TRAIN__TEACHER_MODEL": tmp_path / "weights.safetensors"}
    teacher = teacher_in(student(**words))
    assert all(torch.equal(value, whole[name]) for name, value in teacher.model.state_dict().items())
    save_file({"conv1.weight": torch.ones(2)}, tmp_path / "weights.safetensors")
    text = refused(student, **words)
    assert "unknown to the model (1)" in text
    assert "says which timm model it is, so test_vit.r160_in1k was tried. Give a model" in text


def test_teacher_with_other_classes_or_channels_is_refused(tiny: Path, teacher_run: Path) -> None:
    for key, value, said in (
        ("MODEL.NUM_CLASSES", "7", "has 10 classes, but MODEL.NUM_CLASSES is 7"),
        ("DATA.IMAGE_CHANNELS", "3", "trained with DATA.IMAGE_CHANNELS 1, but here it is 3"),
    ):
        config = load_config(str(tiny), words={key: value, "TRAIN.TEACHER_MODEL": str(teacher_run)}).config
        with pytest.raises(UserError, match=said):
            load_teacher(config, Precision(config.AMP, CPU))


def test_teacher_of_other_classes_or_with_changed_weights_is_refused(student: Student) -> None:
    ready = student()
    teacher, kept = teacher_in(ready), ready.choices
    names = list(teacher.source.names or [])
    assert len(names) == 10
    check_teacher_matches(teacher, names, {**kept, "teacher_model": "another", "teacher_sha256": "other"})
    for known, changed, said in (
        (names[::-1], {}, r"class 0 is .* both must have the same classes in the same order"),
        (None, {"teacher_sha256": "other"}, "the teacher's weights have changed since this run began"),
        (None, {"teacher": "that of then", "teacher_sha256": "other"}, "but this run began with that of then"),
    ):
        with pytest.raises(UserError, match=said):
            check_teacher_matches(teacher, known, {**kept, **changed})


@pytest.mark.slow
def test_distillation_on_two_sharded_processes_equals_one(
    vitamp: Vitamp, tiny: Path, teacher_run: Path, tmp_path: Path
) -> None:
    given = [f"{key.replace('__', '.')}={value}" for key, value in {**DISTILLED, **MIXED}.items()]
    words = ("-cfg", tiny, *given, "TRAIN.DISTILLATION_TYPE=hard", "-teacher_model", teacher_run, "REPORT_FREQ=1")
    words = (*words, "TRAIN.MAX_UPDATES=8", "TRAIN.GLOBAL_BATCH=64")
    vitamp(*words, "-output", tmp_path / "one", code=0)
    sharded = ("-output", tmp_path / "two", "-ngpus", 2, "DIST.STRATEGY=fsdp")
    vitamp(*words, *sharded, script="main_multi_gpu.py", timeout=300, code=0)
    losses = [[line["loss"] for line in metrics(tmp_path / name, "train")] for name in ("one", "two")]
    assert len(losses[0]) == 8
    assert max(abs(a - b) for a, b in zip(*losses, strict=True)) < 1e-5
