"""Where memory runs out: what is told, and TRAIN.OOM split, which repeats the update in parts with the same result."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from engine.evaluate import evaluate
from engine.fit.out_of_memory import Splitting, before_training, describe
from engine.machine.memory import IN_VALIDATION, is_out_of_memory, largest_blocks
from engine.setup import ReadyToTrain
from tests.engine.small import build, train
from tests.program import ROOT, Result, metrics
from utils.config import load_config
from utils.distributed.world import ALONE
from utils.errors import UserError

# A device whose memory holds so many images, ABOVE in training, ABOVE_EVAL in validation; from a forward pass on.
SMALL_DEVICE = f"""
import os, runpy, sys, torch
import timm.models.vision_transformer as vit
whole, count = vit.VisionTransformer.forward, [0]
def forward(self, images):
    count[0] += self.training
    room = int(os.environ.get("ABOVE" if self.training else "ABOVE_EVAL", "1000"))
    here = os.environ.get("RANK", "0") == os.environ.get("ON_RANK", "0")
    if here and len(images) > room and count[0] >= int(os.environ.get("FROM", "1")):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of")
    return whole(self, images)
vit.VisionTransformer.forward = forward
if __name__ == "__main__":
    sys.path.insert(0, {str(ROOT)!r})
    runpy.run_path({str(ROOT / "main_single_gpu.py")!r}, run_name="__main__")
"""


@pytest.fixture
def small_device(vitamp: Callable[..., Result], tiny: Path, tmp_path: Path) -> Callable[..., Result]:
    """Run the tiny recipe on a device with little memory: `small_device(words, ABOVE=16)`."""
    script = tmp_path / "small_device.py"
    script.write_text(SMALL_DEVICE)

    def call(*words: object, **env: object) -> Result:
        return vitamp("-cfg", tiny, *words, script=str(script), env={k: str(v) for k, v in env.items()})

    return call


class Room:
    """Lets a model run out of memory with more images than so many, from its nth forward pass on; `passes`: how many
    there were, and how many of them failed."""

    def __init__(self, model: nn.Module, images: int, since: int, in_backward: bool) -> None:
        self.images, self.since, self.in_backward = images, since, in_backward
        self.passes = self.failed = 0
        first = next(module for module in model.modules() if isinstance(module, nn.LayerNorm))
        model.register_forward_pre_hook(self._count)
        first.register_forward_hook(self._look)

    def _count(self, *_: object) -> None:
        self.passes += 1

    def _look(self, _module: nn.Module, _args: object, out: Tensor) -> None:
        if len(out) <= self.images or self.passes < self.since:
            return
        if not self.in_backward:
            self._fail()
        out.register_hook(lambda _: self._fail())  # by then most layers' gradients have been added up

    def _fail(self) -> None:
        self.failed += 1
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")


WORDS: dict[str, object] = {
    "DATA__BATCH_SIZE": 24,
    "TRAIN__ACCUM_ITER": 2,
    "MODEL__DEPTH": 2,
    "TRAIN__MODEL_EMA": "true",
}
MIXED: dict[str, object] = {"TRAIN__MIXUP_ALPHA": 0.8, "TRAIN__CUTMIX_ALPHA": 1.0, "TRAIN__RANDOM_ERASE_PROB": 0.5}
HALF: dict[str, object] = {"AMP__ENABLED": "true", "AMP__DTYPE": "bf16", "AMP__INIT_LOSS_SCALING": 256}


def trained(tiny: Path, room: tuple[int, int, bool] | None, splits: bool, **words: object) -> tuple[ReadyToTrain, Room]:
    """Four updates; the optimiser is SGD, which does not blow rounding up where gradients are nearly zero."""
    ready = build(tiny, TRAIN__OPTIMIZER__NAME="SGD", TRAIN__BASE_LR=0.1, TRAIN__WARMUP_EPOCHS=0, **{**WORDS, **words})
    parts = ready.parts
    if splits:
        parts.splitting = Splitting(load_config(str(tiny), words={"TRAIN.OOM": "split"}).config, ALONE)
    made = Room(parts.forward, *(room or (1000, 1, False)))
    train(ready, 4)
    return ready, made


def flat(ready: ReadyToTrain) -> Tensor:
    """All weights and, where there is one, their average."""
    parts = ready.parts
    models = [parts.model, *([parts.ema.module] if parts.ema else [])]
    return torch.cat([p.detach().flatten() for model in models for p in model.parameters()])


@pytest.mark.parametrize("in_backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize(
    ("words", "close"),
    [({}, 1e-6), (MIXED, 1e-6), ({**HALF, "AMP__LEVEL": "O2"}, 0.01), ({**HALF, "AMP__DTYPE": "fp16"}, 0.002)],
    ids=["fp32", "mixed images", "O2", "fp16"],
)
def test_a_split_update_is_the_whole_one(tiny: Path, in_backward: bool, words: dict[str, object], close: float) -> None:
    """Memory runs out in the second micro-batch of the second update, when half of its gradient is there."""
    whole, _ = trained(tiny, None, splits=False, **words)
    split, room = trained(tiny, (10, 4, in_backward), splits=True, **words)
    assert split.parts.most_at_once == 6, "24 were too many, and so were 12"
    assert room.failed == 2
    assert room.passes == 2 + 2 + 1 + 3 * 2 * 4, "from then on in four parts"
    start, end, other = (flat(ready) for ready in (build(tiny, **{**WORDS, **words}), whole, split))
    assert (other - end).norm() <= close * (end - start).norm()
    ours, theirs = (ready.parts.meters.read(ready.parts.precision.scale_tensor(), 0.0) for ready in (split, whole))
    assert (ours.epoch.acc1, ours.skipped) == (pytest.approx(theirs.epoch.acc1, abs=1.1), theirs.skipped)
    assert (ours.epoch.loss, ours.grad_norm) == pytest.approx((theirs.epoch.loss, theirs.grad_norm), rel=10 * close)


def test_what_fits_is_not_split_and_equal_to_the_bit(tiny: Path) -> None:
    whole, _ = trained(tiny, None, splits=False, MODEL__DROPOUT=0.1, **MIXED)
    watched, room = trained(tiny, None, splits=True, MODEL__DROPOUT=0.1, **MIXED)
    assert room.passes == 8
    assert torch.equal(flat(watched), flat(whole))


def test_other_errors_are_not_taken_for_it(tiny: Path) -> None:
    ready = build(tiny)
    ready.parts.splitting = Splitting(load_config(str(tiny)).config, ALONE)
    ready.parts.criterion = lambda *_: 1 / 0  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(ZeroDivisionError):
        train(ready, 1)
    assert not is_out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    assert not is_out_of_memory(RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"))
    assert is_out_of_memory(
        RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory")
    )


@pytest.mark.parametrize(
    "text",
    [
        "CUDA error: out of memory",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
        "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
    ],
)
def test_what_the_libraries_of_cuda_say_of_it_is_known(text: str) -> None:
    assert is_out_of_memory(RuntimeError(text))


def test_one_image_that_does_not_fit_ends_it(tiny: Path) -> None:
    with pytest.raises(torch.OutOfMemoryError):
        trained(tiny, (0, 1, False), splits=True)


def test_it_is_told_once_what_helps(small_device: Callable[..., Result], tmp_path: Path) -> None:
    run, words = tmp_path / "run", ["SAVE_FREQ=1", "REPORT_FREQ=1", "TRAIN.MAX_UPDATES=70"]
    done = small_device(*words, "-batch_size", 28, "-output", run, ABOVE=14, FROM=60)
    assert done.code == 1, done.text
    assert "Traceback" not in done.text
    assert done.err.count("out of memory in update 60") == 1
    for part in (
        "was the peak on cpu",
        "and 2.00 GiB more were asked for",
        "28 images at a time, of 8 x 8 x 1: with 5 tokens of width 16 each, one tensor of all tokens takes 8.8 KiB",
        "-batch_size 14 -accum_iter 2",
        "TRAIN.GRAD_CHECKPOINT=blocks",
        "-amp",
        "-batch_size auto",
        f"The last checkpoint is step-000000051: go on from it by -resume {run}",
    ):
        assert part in done.err, part


def test_without_a_checkpoint_the_run_starts_again(small_device: Callable[..., Result], tmp_path: Path) -> None:
    done = small_device("-batch_size", 28, "-output", tmp_path / "run", ABOVE=14)
    assert done.code == 1, done.text
    assert "\nThere is no checkpoint yet: start with one of these." in done.err


def test_who_found_the_batch_by_auto_is_not_told_to(small_device: Callable[..., Result], tmp_path: Path) -> None:
    words = ("-batch_size", "auto", "TRAIN.MEMORY_LIMIT=0.0005", "TRAIN.NUM_EPOCHS=9", "-output", tmp_path / "run")
    done = small_device(*words, ABOVE=1, FROM=150)
    assert done.code == 1, done.text
    assert "out of memory in update" in done.err
    assert "-accum_iter 2" in done.err
    assert "-batch_size auto" not in done.err


def test_a_validation_alone_with_auto_is_told_what_helps(tiny: Path) -> None:
    error = torch.OutOfMemoryError("out of memory")
    error.add_note(IN_VALIDATION)
    config = load_config(str(tiny), words={"DATA.BATCH_SIZE": "auto"}).config
    told = before_training(error, config, torch.device("cpu"))
    assert "-batch_size_eval N, fewer than auto found" in told
    assert "-batch_size auto" not in told


@pytest.mark.slow  # three runs
def test_what_is_said_to_help_helps(small_device: Callable[..., Result], tmp_path: Path) -> None:
    run, whole, words = tmp_path / "run", tmp_path / "whole", ["SAVE_FREQ=1", "REPORT_FREQ=1", "TRAIN.MAX_UPDATES=70"]
    stopped = small_device(*words, "-batch_size", 28, "-output", run, ABOVE=14, FROM=60)
    assert stopped.code == 1, stopped.text
    (resume,) = re.findall(r"go on from it by (-resume \S+) and one of these", stopped.err)
    (advice,) = re.findall(r"Ways out:\n  (-batch_size [^:]+):", stopped.err)
    on = small_device(*resume.split(), *advice.split(), *words, ABOVE=14)
    assert on.code == 0, on.text
    assert small_device(*words, "-batch_size", 28, "-output", whole).code == 0
    ours, theirs = (metrics(folder, "train") for folder in (run, whole))
    assert [line["update"] for line in ours] == [line["update"] for line in theirs]
    assert [line["loss"] for line in ours] == pytest.approx([line["loss"] for line in theirs], rel=1e-4)


def test_what_does_not_even_begin_is_a_mistake_in_the_command(
    small_device: Callable[..., Result], tmp_path: Path
) -> None:
    done = small_device("-dry_run", ABOVE=16, FROM=1)
    assert done.code == 2, done.text
    assert "out of memory in update 1: " in done.err
    assert "-batch_size 16 -accum_iter 2" in done.err
    done = small_device("-eval", "-output", tmp_path / "run", ABOVE_EVAL=16, FROM=0)
    assert done.code == 2, done.text
    assert f"out of memory {IN_VALIDATION}: " in done.err
    assert "-batch_size_eval 16" in done.err
    assert "Traceback" not in done.text


@pytest.mark.slow  # a run; how it is told is tested in test_ways_out.py
def test_a_validation_names_its_own_batch(small_device: Callable[..., Result], tmp_path: Path) -> None:
    done = small_device("-output", tmp_path / "run", "-batch_size_eval", 100, ABOVE_EVAL=60)
    assert done.code == 1, done.text
    assert f"out of memory {IN_VALIDATION} after update 44" in done.err
    assert "100 images at a time" in done.err
    assert "-batch_size_eval 50" in done.err
    assert "-accum_iter" not in done.err


def test_a_split_run_goes_on_split(small_device: Callable[..., Result], tmp_path: Path) -> None:
    run, words = tmp_path / "run", ["TRAIN.OOM=split", "SAVE_FREQ=1", "REPORT_FREQ=1"]
    done = small_device(*words, "-output", run, ABOVE=16, FROM=20)
    assert done.code == 0, done.text
    assert done.text.count("Out of memory in update 20 with 32 images at a time") == 1
    assert "from now on at most 16" in done.text
    whole, last = metrics(run, "train"), run / "checkpoints" / "step-000000088"
    weights = (last / "model.safetensors").read_bytes()
    shutil.rmtree(last)
    (run / "checkpoints" / "index.json").unlink()
    on = small_device(*words, "-resume", run, ABOVE=16)
    assert on.code == 0, on.text
    assert "Out of memory" not in on.text, "where it stands was saved"
    assert metrics(run, "train") == whole
    assert (last / "model.safetensors").read_bytes() == weights


@pytest.fixture
def small_on_rank_1(tmp_path: Path) -> dict[str, str]:
    """The environment in which rank 1 of two, from its 13th update on, has room for 8 images."""
    hook = tmp_path / "hook"
    hook.mkdir()
    (hook / "sitecustomize.py").write_text(SMALL_DEVICE.partition("if __name__")[0])
    return {"PYTHONPATH": str(hook), "ABOVE": "8", "FROM": "13", "ON_RANK": "1"}


@pytest.mark.slow  # three runs of two processes
def test_of_two_processes_one_that_has_too_little_stops_both_with_all_saved(
    vitamp: Callable[..., Result], tiny: Path, tmp_path: Path, small_on_rank_1: dict[str, str]
) -> None:
    run = tmp_path / "run"
    done = vitamp(
        *("-cfg", tiny, "-ngpus", 2, "-output", run, "TRAIN.OOM=split", "-batch_size", 16, "REPORT_FREQ=5"),
        script="main_multi_gpu.py",
        env=small_on_rank_1,
    )
    assert done.code == 1, done.text
    assert done.err.count("out of memory in update 13") == 1
    assert "rank 1 on " in done.err
    assert "-batch_size 8 -accum_iter 2" in done.err
    assert "Traceback" not in done.text
    assert json.loads((run / "checkpoints" / "index.json").read_text())["last"] == "step-000000012"
    on = vitamp("-resume", run, "-batch_size", 8, "-accum_iter", 4, "TRAIN.MAX_UPDATES=15", "TRAIN.OOM=stop")
    assert on.code == 0, on.text
    assert [line["update"] for line in metrics(run, "train")] == [5, 10, 15]


@pytest.mark.slow  # two processes, and only what one of them says is new
def test_a_rank_that_stops_is_named_and_ends_the_others(
    vitamp: Callable[..., Result], tiny: Path, tmp_path: Path, small_on_rank_1: dict[str, str]
) -> None:
    done = vitamp(
        *("-cfg", tiny, "-ngpus", 2, "-output", tmp_path / "run", "-batch_size", 16, "REPORT_FREQ=5"),
        script="main_multi_gpu.py",
        env=small_on_rank_1,
    )
    assert done.code == 1, done.text
    assert done.err.count("out of memory in update 13") == 1
    assert "rank 1 on " in done.err
    assert "-batch_size 8 -accum_iter 2" in done.err


def test_what_cannot_be_split_is_refused(tiny: Path) -> None:
    for word in ("DIST.STRATEGY=fsdp", "DIST.BF16_GRADIENTS=true", "DIST.STATIC_GRAPH=true"):
        key, _, value = word.partition("=")
        with pytest.raises(UserError, match=r"TRAIN\.OOM"):
            load_config(str(tiny), words={"TRAIN.OOM": "split", key: value})


def test_a_gpus_largest_blocks_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def block(size: int, state: str = "active_allocated") -> dict[str, object]:
        return {"size": size << 20, "state": state}

    segments = [
        {"device": 1, "blocks": [block(592), block(592), block(3), block(9000, "inactive")]},
        {"device": 1, "blocks": [block(148)] * 5},
        {"device": 0, "blocks": [block(4000)]},
    ]
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: segments)
    assert largest_blocks(torch.device("cuda", 1), kinds=2) == "2 x 0.6 GiB, 5 x 148.0 MiB"
    assert largest_blocks(torch.device("cpu")) is None


@pytest.fixture
def full(tiny: Path) -> ReadyToTrain:
    ready = build(tiny)
    Room(ready.parts.model, 10, 1, in_backward=False)
    return ready


def test_a_validation_leaves_the_model_as_it_was(
    full: ReadyToTrain, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.fit.out_of_memory.largest_blocks", lambda _device: "2 x 0.6 GiB")
    with pytest.raises(torch.OutOfMemoryError) as caught:
        evaluate(full.model, full.val_loader, len(full.val_set), full.inputs, full.precision, ALONE)
    assert full.model.training
    told = describe(caught.value, load_config(str(tiny)).config, full.parts, 7)
    assert told.startswith(f"out of memory {IN_VALIDATION} after update 6: ")
    assert re.search(r"was the peak on cpu \(.+\), of [\d.]+ GiB in all, and 20\.00 MiB more were asked for\.\n", told)
    assert "\n  Most of the memory is taken by 2 x 0.6 GiB.\n" in told
