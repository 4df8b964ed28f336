"""Weights dealt out over ranks: the same run as with whole ones, saved by one number of ranks and read by any."""

import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from tests.ddp.test_amp_ddp import FSDP_LEVELS, GATHERS_IN_HALF
from tests.program import ROOT, Result, Started, Vitamp, last_weights, metrics, run_program
from tests.saved import save_checkpoint
from tests.waiting import free_port
from vitamp.checkpoints import MODEL, inspect, verify
from vitamp.metrics import AVERAGE
from vitamp.tensors import open_tensors, read_state

FSDP, EMA = "DIST.STRATEGY=fsdp", AVERAGE.file
# Whatever could differ from rank to rank; 30 weights in the head do not divide by 4, and 101 images not by 2.
WORDS = [
    *("DATA.DATASET=synthetic", "DATA.SYNTHETIC_TRAIN=400", "DATA.SYNTHETIC_VAL=101", "-batch_size", "4"),
    *("-batch_size_eval", "16", "MODEL.DEPTH=2", "MODEL.DROPOUT=0.1", "MODEL.DROPPATH=0.1", "-accum_iter", "2"),
    *("TRAIN.MODEL_EMA=true", "TRAIN.NUM_EPOCHS=2", "TRAIN.WARMUP_EPOCHS=0.5", "REPORT_FREQ=1"),
]
UPDATES = 50
STOPPED_AT = 30
HALVES = ["-amp", "fp16", f"AMP.LEVEL={FSDP_LEVELS[-1]}", "AMP.INIT_LOSS_SCALING=1024"]
# Read by every Python that starts with its folder in PYTHONPATH: in the third update rank 1, and no other, finds one
# gradient of its own rows infinite.
OVERFLOW_ON_ONE_RANK = """
import os
if os.environ.get("RANK") == "1":
    import torch
    unscale, calls = torch.amp.GradScaler.unscale_, []
    def overflowing(self, optimizer):
        calls.append(1)
        if len(calls) == 3:
            gradient = next(p.grad for g in optimizer.param_groups for p in g["params"] if p.grad.to_local().numel())
            gradient.to_local().view(-1)[0] = float("inf")
        return unscale(self, optimizer)
    torch.amp.GradScaler.unscale_ = overflowing
"""


def start(place: Path, name: str, *words: object, ranks: int = 2, **options: Any) -> tuple[Path, Result]:
    script, how = ("main_multi_gpu.py", ("-ngpus", ranks)) if ranks > 1 else ("main_single_gpu.py", ())
    run = place / name
    arguments = ("-cfg", place / "tiny.yaml", "-output", run, *how, *WORDS, *words)
    done = run_program(*arguments, script=script, streams=place, timeout=240, **options, code=0)
    return run, done


@pytest.fixture(scope="module")
def dealt(place: Path) -> Path:
    return start(place, "dealt", FSDP, f"SAVE_EVERY_UPDATES={STOPPED_AT}", "KEEP_LAST=0")[0]


@pytest.fixture(scope="module")
def whole(place: Path) -> Path:
    return start(place, "whole", f"SAVE_EVERY_UPDATES={STOPPED_AT}", "KEEP_LAST=0")[0]


def figures(run: Path) -> dict[tuple[str, int], dict[str, float]]:
    return {
        (line["event"], line["update"]): {k: v for k, v in line.items() if isinstance(v, float) and k != "grad_norm"}
        for line in metrics(run)
        if line["event"] in ("train", "val")
    }


def agrees(run: Path, other: Path, first: int = 1) -> int:
    """Holds the figures of two runs against each other; how many there were."""
    ours, theirs = figures(run), figures(other)
    compared = [key for key in ours if key[1] >= first]
    for key in compared:
        assert ours[key] == pytest.approx(theirs[key], rel=1e-5), key
    return len(compared)


def test_fifty_updates_are_those_of_ddp(dealt: Path, whole: Path) -> None:
    assert agrees(dealt, whole) == UPDATES + 2, "and two validations"
    norms = [[line["grad_norm"] for line in metrics(run, "train")] for run in (dealt, whole)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-3), "of all the weights and not of a rank's rows"


def test_each_rank_saves_its_rows_and_no_more(dealt: Path, whole: Path) -> None:
    folder = dealt / "checkpoints" / f"step-{UPDATES:09d}"
    names = {path.name for path in folder.iterdir()}
    shards = {f"{what}.shard-{n}-of-2.safetensors" for what in ("model", "ema", "optimizer") for n in (1, 2)}
    assert names == shards | {"meta.json", "state.pt"}
    assert set(json.loads((folder / "meta.json").read_text())["files"]) == names - {"meta.json"}
    first, second = (safetensors.torch.load_file(folder / f"model.shard-{n}-of-2.safetensors") for n in (1, 2))
    for name, tensor in safetensors.torch.load_file(whole / folder.relative_to(dealt) / "model.safetensors").items():
        rows = [part[name] for part in (first, second) if name in part]
        assert sum(len(part) for part in rows) == len(tensor), name
        assert {part.shape[1:] for part in rows} == {tensor.shape[1:]}, name
        assert len(tensor) == 1 or len(rows[0]) == -(-len(tensor) // 2), name


def resumed(place: Path, dealt_run: Path, name: str, *words: object, ranks: int) -> tuple[Path, Result]:
    """A run that goes on from the checkpoint amid the second epoch."""
    return start(place, name, "-resume", dealt_run / "checkpoints" / f"step-{STOPPED_AT:09d}", *words, ranks=ranks)


@pytest.mark.slow
def test_resumed_it_is_the_run_that_was_never_stopped(place: Path, dealt: Path) -> None:
    run, _ = resumed(place, dealt, "again", FSDP, ranks=2)
    undisturbed = [line for line in metrics(dealt) if line["event"] in ("train", "val") and line["update"] > STOPPED_AT]
    assert [line for line in metrics(run) if line["event"] in ("train", "val")] == undisturbed
    assert last_weights(run) == last_weights(dealt)


@pytest.mark.parametrize(
    ("ranks", "strategy"),
    [
        (1, FSDP),
        pytest.param(2, "DIST.STRATEGY=ddp", marks=pytest.mark.slow),
        pytest.param(4, FSDP, marks=pytest.mark.slow),
    ],
    ids=["by one process", "by DDP", "by four"],
)
def test_it_goes_on_otherwise(place: Path, dealt: Path, ranks: int, strategy: str) -> None:
    accumulated = () if ranks == 1 else ("-accum_iter", 4 // ranks)
    run, done = resumed(place, dealt, f"on {ranks} {strategy[-4:]}", strategy, *accumulated, ranks=ranks)
    assert agrees(run, dealt, STOPPED_AT + 1) == UPDATES - STOPPED_AT + 1
    if ranks == 1:
        assert "TRAIN.ACCUM_ITER is 4 instead of 2" in done.out
        assert (run / "checkpoints" / f"step-{UPDATES:09d}" / "model.safetensors").exists()


@pytest.mark.slow
def test_it_goes_on_from_ddp(place: Path, whole: Path) -> None:
    run, _ = resumed(place, whole, "from ddp", FSDP, ranks=2)
    assert agrees(run, whole, STOPPED_AT + 1) == UPDATES - STOPPED_AT + 1


@pytest.mark.slow
@pytest.mark.parametrize("level", FSDP_LEVELS)
def test_modules_moved_to_fp32_stay_there(place: Path, whole: Path, tmp_path: Path, level: str) -> None:
    """AMP.AUTO_FP32 of a ddp run moved them. FSDP must know them before it shards the weights."""
    modules = ["blocks.0.mlp.fc1", "blocks.1.attn"]
    source = inspect(whole / "checkpoints" / f"step-{STOPPED_AT:09d}")
    state = {**read_state(source), "fp32_modules": modules}
    meta = {key: value for key, value in source.meta.items() if key not in ("format", "files")}
    tensors = {name: dict(open_tensors(source, name)) for name in (MODEL, EMA)}
    moved = save_checkpoint(tmp_path, STOPPED_AT, tensors, state, meta)
    words = ("-amp", "bf16", f"AMP.LEVEL={level}", "-resume", moved, f"TRAIN.MAX_UPDATES={STOPPED_AT + 2}")
    kinds = ("fsdp", "ddp")
    ours, theirs = (start(place, f"moved {level} {kind}", *words, f"DIST.STRATEGY={kind}")[0] for kind in kinds)
    losses = [[line["loss"] for line in metrics(run, "train")] for run in (ours, theirs)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    saved = inspect(ours / "checkpoints" / f"step-{STOPPED_AT + 2:09d}")
    assert read_state(saved)["fp32_modules"] == modules, "for the next resume"


def test_saved_weights_can_be_looked_at_and_handed_on(vitamp: Vitamp, place: Path, dealt: Path, tmp_path: Path) -> None:
    out = tmp_path / "weights.safetensors"
    vitamp("-cfg", place / "tiny.yaml", *WORDS, "-pretrained", dealt, "-dry_run", code=0)
    vitamp("strip", dealt, "-weights", "model", "-out", out, script="scripts/checkpoint.py", code=0)
    run = tmp_path / "seen"
    vitamp("-cfg", place / "tiny.yaml", *WORDS, "-pretrained", out, "-eval", "-output", run, code=0)
    best = max(metrics(dealt, "val"), key=lambda line: max(line["acc1"], line["ema_acc1"]))
    (seen,) = metrics(run, "val")
    assert seen["loss"] == pytest.approx(best["loss"], rel=1e-6)


@pytest.mark.slow
def test_an_overflow_on_one_rank_skips_the_update_on_all(place: Path, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(OVERFLOW_ON_ONE_RANK)
    words = (FSDP, *HALVES, "TRAIN.MAX_UPDATES=5", "-accum_iter", "1", "SEED=3")
    run, _ = start(place, "overflow", *words, env={"PYTHONPATH": str(tmp_path)})
    lines = metrics(run, "train")
    assert [line["skipped"] for line in lines] == [0, 0, 1, 1, 1]
    assert [line["scale"] for line in lines] == [1024, 1024, 512, 512, 512]
    state = torch.load(run / "checkpoints" / "step-000000005" / "state.pt", weights_only=True)
    assert {float(values["step"]) for values in state["optimizer"]["state"].values()} == {4.0}
    for path in (run / "checkpoints" / "step-000000005").glob("*.safetensors"):
        assert all(torch.isfinite(tensor).all() for tensor in safetensors.torch.load_file(path).values()), path.name


@pytest.mark.slow
@pytest.mark.parametrize("level", [*FSDP_LEVELS, *["NAIVE"] * GATHERS_IN_HALF])
def test_mixed_precision_is_that_of_ddp(place: Path, level: str) -> None:
    words = ("-amp", "bf16", f"AMP.LEVEL={level}", "TRAIN.MAX_UPDATES=6", "MODEL.DROPOUT=0")
    runs = [start(place, f"{level}{strategy}", *words, f"DIST.STRATEGY={strategy}")[0] for strategy in ("ddp", "fsdp")]
    ours, theirs = (figures(run) for run in runs)
    assert ours.keys() == theirs.keys()
    for key in ours:
        assert ours[key]["loss"] == pytest.approx(theirs[key]["loss"], rel=2e-3)
    saved = safetensors.torch.load_file(runs[1] / "checkpoints" / "step-000000006" / "model.shard-1-of-2.safetensors")
    assert {tensor.dtype for tensor in saved.values()} == {torch.float32}, "the masters are what is kept"


@pytest.mark.slow
@pytest.mark.parametrize("amp", [(), *(("-amp", "bf16", f"AMP.LEVEL={level}") for level in FSDP_LEVELS)])
def test_sharded_fine_tuning_equals_one_process_and_may_be_thawed(
    vitamp: Vitamp, tiny: Path, digits_run: Path, tmp_path: Path, amp: tuple[str, ...]
) -> None:
    tuned = ("-cfg", tiny, "-pretrained", digits_run, "MODEL.NEW_CLASSIFIER=true", "MODEL.DROPOUT=0.1", "SEED=5", *amp)
    tuned += ("MODEL.FREEZE=patch_embed,pos_embed,cls_token", "TRAIN.LAYER_DECAY=0.6", "TRAIN.MODEL_EMA=true")
    words = (*tuned, "-batch_size", 16, "REPORT_FREQ=1", "TRAIN.MAX_UPDATES=20")
    vitamp(*words, "-output", tmp_path / "one", "-accum_iter", 2, code=0)
    sharded = (*words, "-output", tmp_path / "two", "-resume", "auto", "-ngpus", 2, "DIST.STRATEGY=fsdp")
    vitamp(*sharded, script="main_multi_gpu.py", code=0)
    alone, both = ([line["loss"] for line in metrics(tmp_path / name, "train")] for name in ("one", "two"))
    assert both == pytest.approx(alone, rel=1e-2 if amp else 1e-5)
    thawed = vitamp(*sharded, "MODEL.FREEZE=null", "TRAIN.MAX_UPDATES=25", script="main_multi_gpu.py", code=0)
    assert "trained from now on (MODEL.FREEZE): 4 tensors" in thawed.out


@pytest.mark.slow
@pytest.mark.parametrize("level", FSDP_LEVELS)
def test_sharded_blocks_can_be_compiled(place: Path, level: str) -> None:
    words = (FSDP, "-amp", "bf16", f"AMP.LEVEL={level}", "TRAIN.MAX_UPDATES=3", "MODEL.DROPOUT=0", "MODEL.DROPPATH=0")
    runs = [start(place, f"{level} {how}", *words, f"TRAIN.COMPILE={how}")[0] for how in ("blocks", "none")]
    losses = [[line["loss"] for line in metrics(run, "train")] for run in runs]
    assert losses[0] == pytest.approx(losses[1], rel=2e-3)


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("TRAIN.OPTIMIZER.NAME=adafactor", "TRAIN.OPTIMIZER.NAME adafactor was not tested with DIST.STRATEGY fsdp"),
        ("DIST.HSDP=true", "It needs two or more machines"),
    ],
)
def test_what_cannot_be_is_refused(vitamp: Vitamp, tiny: Path, word: str, said: str) -> None:
    run = tiny.with_name("run")
    done = vitamp("-cfg", tiny, "-ngpus", 2, "-output", run, FSDP, word, script="main_multi_gpu.py")
    assert (done.code, said in done.err, run.exists()) == (2, True, False), done.text


@pytest.mark.slow
def test_out_of_time_all_rows_are_saved_before_anybody_leaves(place: Path) -> None:
    run, done = start(place, "paused", FSDP, "TRAIN.NUM_EPOCHS=100000", "-max_time", "00:00:01")
    assert "Paused" in done.out
    index = json.loads((run / "checkpoints" / "index.json").read_text())
    found = verify(inspect(run / "checkpoints" / index["last"]))
    assert found.meta["update"] == metrics(run, "train")[-1]["update"]
    assert {path.name for path in (run / "checkpoints").iterdir()} >= {index["last"], "index.json"}
    assert not list((run / "checkpoints").glob(".tmp-*"))


@pytest.mark.slow
def test_dealt_out_within_two_machines_it_is_the_same_run(place: Path, tmp_path: Path) -> None:
    """Four processes whose launcher says that two each are on a machine. Both accumulate two micro-batches."""
    plain, _ = start(place, "four plain", ranks=4)
    run = place / "four on two"
    by_hand = ("-host", "127.0.0.1", "-port", free_port(), "-world_size", 4)
    words = (FSDP, "DIST.HSDP=true", *by_hand)
    path, ranks = ROOT / "main_multi_gpu.py", []
    for rank in range(4):
        streams = tmp_path / str(rank)
        streams.mkdir()
        argv = ["-cfg", place / "tiny.yaml", "-output", run, *WORDS, *words, "-rank", rank]
        env = {"LOCAL_RANK": str(rank % 2), "LOCAL_WORLD_SIZE": "2"}
        ranks.append(Started(str(path), [str(word) for word in argv], ROOT, env, streams))
    for rank in ranks:
        rank.end(240).expect(0)
    assert agrees(run, plain) == UPDATES // 2 + 1 + 2, "13 updates per epoch, and two validations"
    names = {path.name for path in (run / "checkpoints" / f"step-{UPDATES // 2 + 1:09d}").glob("model*")}
    assert names == {"model.shard-1-of-2.safetensors", "model.shard-2-of-2.safetensors"}
