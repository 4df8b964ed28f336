"""Mixed precision on two processes: one exchange an update, the same weights, and skips together."""

import multiprocessing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed
from safetensors.torch import save_file
from torch.distributed.fsdp import MixedPrecisionPolicy

from datasets import Window
from engine.optim.ema import Ema
from engine.setup import ReadyToTrain
from engine.update import train_update
from tests.engine.amp.modes import MODES, PLAIN_STEPS, WITH_MASTERS
from tests.engine.small import CPU, build
from tests.program import Vitamp, metrics
from utils.distributed.world import ALONE, World

LEVELS = {"fp32": {}, **{mode: MODES[mode] for mode in WITH_MASTERS if mode != "NAIVE fp16"}}
GATHERS_IN_HALF = hasattr(MixedPrecisionPolicy, "param_dtype_override_fn")
"""From torch 2.15 on, which FSDP needs at O2 and NAIVE"""
FSDP_LEVELS = ["O1", *["O2"] * GATHERS_IN_HALF]
WORDS = {**PLAIN_STEPS, "TRAIN__GRAD_CLIP": 1, "TRAIN__MODEL_EMA": "true", "DATA__BATCH_SIZE": 16, "MODEL__DEPTH": 2}
UPDATES = 3
NEVER = 0


def train(tiny: Path, words: dict[str, object], world: World, overflow_at: int) -> dict[str, Any]:
    """A few updates; at `overflow_at` the last rank, and it alone, is given images that are not finite."""
    ready = build(tiny, CPU, world, **words)
    seen: list[int] = []
    exchanges = 0
    exchange = torch.distributed.all_reduce

    def counted(*args: Any, **options: Any) -> Any:
        nonlocal exchanges
        exchanges += 1
        return exchange(*args, **options)

    torch.distributed.all_reduce = counted
    for update, window in zip(range(1, UPDATES + 1), ready.train_loader.epoch(1), strict=False):
        pairs = list(window)
        seen += [int(index) for _, batch in pairs for index in batch.indices]
        if update == overflow_at and world.rank == world.size - 1:
            share, batch = pairs[0]
            pairs[0] = share, batch._replace(images=torch.full(batch.images.shape, float("inf")))
        train_update(ready.parts, Window(tuple(s for s, _ in pairs), iter([b for _, b in pairs])), update)
    torch.distributed.all_reduce = exchange
    return {"exchanges": exchanges, "seen": seen, **outcome(ready)}


def outcome(ready: ReadyToTrain) -> dict[str, Any]:
    parts = ready.parts
    ema = parts.callback(Ema)
    assert ema is not None
    reading = parts.meters.read(parts.precision.scale_tensor(), 0.0)
    return {
        "weights": torch.cat([p.detach().flatten() for p in parts.model.parameters()]),
        "computing": torch.cat([p.detach().flatten().float() for p in parts.forward.parameters()]),
        "average": torch.cat([p.detach().flatten() for p in ema.module.parameters()]),
        "moved": parts.schedule.stepped,
        "averaged": int(ema.updates),
        "scale": reading.scale,
        "norm": reading.grad_norm,
        "skipped": reading.skipped,
    }


def in_two_processes(folder: Path, call: Callable[..., None], *given: object) -> None:
    """Call `call(world, *given)` as each of two ranks, which meet in `folder`."""
    context = multiprocessing.get_context("forkserver")
    ranks = [context.Process(target=_rank, args=(rank, folder, call, *given)) for rank in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(120)
    assert [process.exitcode for process in ranks] == [0, 0]


def _rank(rank: int, folder: Path, call: Callable[..., None], *given: object) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    call(World(rank, 2, rank, 2), *given)
    torch.distributed.destroy_process_group()


def train_and_save(world: World, tiny: Path, words: dict[str, object], overflow_at: int) -> None:
    torch.save(train(tiny, words, world, overflow_at), tiny.with_name(f"{world.rank}.pt"))


def on_two(tiny: Path, words: dict[str, object], overflow_at: int = NEVER) -> list[dict[str, Any]]:
    in_two_processes(tiny.parent, train_and_save, tiny, {**WORDS, **words}, overflow_at)
    return [torch.load(tiny.with_name(f"{rank}.pt"), weights_only=True) for rank in range(2)]


def alike(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    """Ranks that agree in everything but the samples they saw."""
    for key, value in ours.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(value, theirs[key]), key
        elif key not in ("seen", "norm"):
            assert value == theirs[key], key


@pytest.mark.parametrize("level", [*LEVELS])
def test_two_processes_with_accumulation_are_one_with_more_of_it(tiny: Path, level: str) -> None:
    first, second = on_two(tiny, {**LEVELS[level], "TRAIN__ACCUM_ITER": 2})
    alike(first, second)
    assert not set(first["seen"]) & set(second["seen"]), "each its own samples"
    assert first["exchanges"] == UPDATES, "once an update, not once a micro-batch"
    words = {**WORDS, **LEVELS[level], "TRAIN__ACCUM_ITER": 4}
    alone = train(tiny, words, ALONE, NEVER)
    assert alone["moved"] == first["moved"] == UPDATES
    model = build(tiny, **words).model
    start = torch.cat([weight.detach().flatten() for weight in model.parameters()])
    moved = (alone["weights"] - start).norm()
    assert (first["weights"] - alone["weights"]).norm() < 1e-5 * moved
    assert first["norm"] == pytest.approx(alone["norm"], rel=1e-5)


@pytest.mark.parametrize("level", [level for level in LEVELS if level.endswith("fp16")])
def test_one_rank_s_overflow_is_skipped_by_both(tiny: Path, level: str) -> None:
    first, second = on_two(tiny, {**LEVELS[level], "TRAIN__ACCUM_ITER": 2}, overflow_at=2)
    alike(first, second)
    assert (first["moved"], first["averaged"], first["skipped"], first["scale"]) == (UPDATES - 1, UPDATES - 1, 1, 512)
    assert first["weights"].isfinite().all()


def test_what_one_rank_found_is_told_once_and_both_move_the_module(vitamp: Vitamp, tiny: Path, tmp_path: Path) -> None:
    weights = {name: tensor.clone() for name, tensor in build(tiny).model.state_dict().items()}
    weights["blocks.0.mlp.fc1.bias"].fill_(7e4)
    save_file(weights, tmp_path / "bias.safetensors")
    # Reports are so rare that before the first one, enough updates are skipped to end the run.
    words = ("-amp", "fp16", "AMP.AUTO_FP32=true", "TRAIN.WARMUP_EPOCHS=0", "REPORT_FREQ=100", "-batch_size", 4)
    done = vitamp(
        *("-cfg", tiny, "-output", tmp_path / "run", "-pretrained", tmp_path / "bias.safetensors", "-ngpus", 2),
        *words,
        script="main_multi_gpu.py",
    )
    assert done.code == 0, done.text
    moved = "AMP.AUTO_FP32: blocks.0.mlp.fc1 overflowed 2 times and computes in fp32 from now on"
    assert done.out.count(moved) == 1
    assert moved in (tmp_path / "run" / "ranks" / "1.log").read_text()
    skips = metrics(tmp_path / "run", "skip")
    assert [skip["update"] for skip in skips] == sorted({skip["update"] for skip in skips}), "one line an update"
    assert skips[0]["module"] == "blocks.0.mlp.fc1"
    last = metrics(tmp_path / "run", "train")[-1]
    assert last["skipped"] < 200
    assert last["grad_norm"] > 0
