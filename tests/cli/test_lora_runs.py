"""MODEL.LORA in runs: small checkpoints beside one file of frozen weights, exact resume, merged weights for tools."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import load_file
from torch import Tensor

import vitamp as vitamp_package
from engine.checkpoint.restore import load_weights
from engine.trained.model import load_trained
from models.weights.fit import load_pretrained
from tests.engine.small import build
from tests.program import Vitamp, metrics, run_program, train_tiny
from tests.refused import refusal
from utils.errors import UserError
from vitamp.checkpoints import inspect, verify
from vitamp.tensors import open_tensors

LORA = ("MODEL.LORA.RANK=2", "MODEL.LORA.ALPHA=6", "MODEL.LORA.TARGETS=q,v,fc1")
WORDS = (
    *("-amp", "bf16", "TRAIN.MODEL_EMA=true", "TRAIN.MODEL_EMA_DECAY=0.9", "MODEL.DROPOUT=0.1", "MODEL.DROPPATH=0.1"),
    *("TRAIN.BASE_LR=0.02", "TRAIN.ACCUM_ITER=2", "DATA.BATCH_SIZE=16", "SAVE_FREQ=1", "REPORT_FREQ=5", "KEEP_LAST=0"),
)
PER_EPOCH, BEFORE = 45, 44
HEAD = {"head.weight", "head.bias"}
ADAPTERS = {f"blocks.0.attn.qkv.lora_{part}_{matrix}" for part in "qv" for matrix in "AB"}
ADAPTERS |= {"blocks.0.mlp.fc1.lora_fc1_A", "blocks.0.mlp.fc1.lora_fc1_B"}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the recipe, a run to start from, and a whole run with adapters. Not to be changed."""
    folder = tmp_path_factory.mktemp("lora")
    train_tiny(folder, "TRAIN.NUM_EPOCHS=1", "TRAIN.WARMUP_EPOCHS=1")
    (folder / "run").rename(folder / "base")
    done = run_program(*command(folder), "-output", folder / "run", streams=folder, code=0)
    (folder / "said").write_text(done.out)
    return folder


def command(place: Path) -> list[object]:
    return ["-cfg", place / "tiny.yaml", "-pretrained", place / "base", *LORA, *WORDS]


def step(run: Path, update: int = 2 * PER_EPOCH) -> Path:
    return run / "checkpoints" / f"step-{update:09d}"


def test_checkpoints_hold_adapters_and_classifier_and_the_run_holds_the_rest_once(place: Path) -> None:
    run, frozen = place / "run", place / "run" / "checkpoints" / "base.safetensors"
    for which in ("model", "ema"):
        assert load_file(step(run) / f"{which}.safetensors").keys() == HEAD | ADAPTERS
    state = torch.load(step(run) / "state.pt", weights_only=True)
    assert set(state["trained"]) == HEAD | ADAPTERS
    before, base = load_file(step(place / "base", BEFORE) / "model.safetensors"), load_file(frozen)
    assert base.keys() == before.keys() - HEAD
    assert all(torch.equal(base[name], before[name]) for name in base)
    ours, theirs = (
        (step(p, n) / "model.safetensors").stat().st_size for p, n in ((run, 2 * PER_EPOCH), (place / "base", BEFORE))
    )
    assert ours < 0.3 * theirs, "the tiny model has few other weights"
    meta = json.loads((step(run) / "meta.json").read_text())["lora"]
    assert (meta["factor"], meta["source"]) == (3, str(place / "base"))
    row = (
        "trained    LoRA of rank 2, alpha 6, on q, v, fc1 in 2 layers (288 parameters) and the classifier: 458 of 4,138"
    )
    assert row in (place / "said").read_text()
    assert f"The frozen weights are in {frozen}" in (place / "said").read_text()


def logits_unmerged(place: Path, images: Tensor) -> Tensor:
    """Logits of the plain weights, computed with adapters."""
    words = {f"MODEL__LORA__{key}": value for key, value in (("RANK", 2), ("ALPHA", 6), ("TARGETS", "q,v,fc1"))}
    ready = build(place / "tiny.yaml", MODEL__PRETRAINED=place / "base", **words)
    load_weights(ready.model, open_tensors(inspect(step(place / "run")), merged=False), "test")
    with torch.no_grad():
        return ready.model.eval()(ready.inputs(images))


def test_tools_get_merged_weights_in_a_plain_model(vitamp: Vitamp, place: Path, tmp_path: Path) -> None:
    run, images = place / "run", torch.randint(0, 256, (8, 1, 8, 8), dtype=torch.uint8)
    expected = logits_unmerged(place, images)
    trained = load_trained(step(run), weights="model", amp="off")
    torch.testing.assert_close(trained.logits(images), expected, rtol=0, atol=1e-5)
    plain = load_file(step(place / "base", BEFORE) / "model.safetensors")
    merged = trained.model.state_dict()
    assert merged.keys() == plain.keys()
    changed = {name for name in plain if not torch.equal(merged[name], plain[name])}
    assert changed == {*HEAD, "blocks.0.attn.qkv.weight", "blocks.0.mlp.fc1.weight"}
    keys = slice(16, 32)
    assert torch.equal(*(weights["blocks.0.attn.qkv.weight"][keys] for weights in (merged, plain))), "k has no adapter"
    fresh = build(place / "tiny.yaml").model
    load_pretrained(fresh, str(step(run)), "tiny")
    assert all(torch.equal(merged[name], value) for name, value in fresh.state_dict().items())
    for name, value in vitamp_package.load(step(run), "model")[0].state_dict().items():
        torch.testing.assert_close(merged[name], value, rtol=0, atol=1e-7)

    words = (run, "-to", "safetensors", "-out", tmp_path / "out.safetensors", "-weights", "model")
    vitamp(*words, script="scripts/export.py", code=0)
    sizes: dict[str, Any] = {"num_classes": 10, "in_chans": 1, "img_size": 8, "patch_size": 4}
    sizes |= {"embed_dim": 16, "num_heads": 2, "depth": 1}
    timms = timm.create_model("vit_base_patch16_224", **sizes, checkpoint_path=str(tmp_path / "out.safetensors"))
    best = load_trained(run, weights="model", amp="off")
    with torch.no_grad():
        torch.testing.assert_close(timms.eval()(best.inputs(images)), best.logits(images), rtol=0, atol=1e-5)


def test_validation_of_the_merged_weights_gives_the_metrics_of_training(
    vitamp: Vitamp, place: Path, tmp_path: Path
) -> None:
    vitamp("-resume", step(place / "run"), "-eval", "-output", tmp_path / "eval", "-amp", "off", code=0)
    before, now = metrics(place / "run", "val")[-1], metrics(tmp_path / "eval", "val")[-1]
    for name in ("loss", "ema_loss"):
        assert now[name] == pytest.approx(before[name], rel=2e-2), "computed in bf16 then, in fp32 now"


def test_a_moved_run_keeps_working_and_a_checkpoint_alone_says_what_it_lacks(place: Path, tmp_path: Path) -> None:
    moved = tmp_path / "elsewhere"
    shutil.copytree(place / "run", moved)
    verify(inspect(step(moved)))
    alone = tmp_path / "alone"
    shutil.copytree(step(moved), alone)
    said = refusal(inspect, alone)
    with pytest.raises(ValueError, match="need the frozen weights of their run"):
        vitamp_package.load(alone)
    for words in (
        f"(made of {place / 'base'})",
        f"{alone / 'base.safetensors'} nor {tmp_path / 'base.safetensors'}",
        "strip",
    ):
        assert words in said
    frozen = moved / "checkpoints" / "base.safetensors"
    shutil.copy2(frozen, alone)
    verify(inspect(alone))
    content = bytearray(frozen.read_bytes())
    content[-1] ^= 1
    frozen.write_bytes(content)
    with pytest.raises(UserError, match="damaged or of another run, its contents are not those"):
        verify(inspect(step(moved)))
    with pytest.raises(UserError, match="damaged or of another run, its contents are not those"):
        load_pretrained(build(place / "tiny.yaml").model, str(moved), "tiny")
    with pytest.raises(ValueError, match="damaged or of another run, its contents are not those"):
        vitamp_package.load(moved)
    frozen.write_bytes(content[:-8])
    with pytest.raises(UserError, match="does not have the size"):
        inspect(step(moved))
    (alone / "meta.json").unlink()
    with pytest.raises(UserError, match="holds adapters, and the meta"):
        load_pretrained(build(place / "tiny.yaml").model, str(alone / "model.safetensors"), "tiny")


def test_resuming_with_other_adapters_is_refused_and_without_any_trains_the_merged_weights(
    vitamp: Vitamp, place: Path, tmp_path: Path
) -> None:
    once = ("-resume", place / "run", "TRAIN.NUM_EPOCHS=3", f"TRAIN.MAX_UPDATES={2 * PER_EPOCH + 1}")
    done = vitamp(*once, "-output", tmp_path / "a", "MODEL.LORA.ALPHA=2", code=2)
    assert "{RANK: 2, ALPHA: 6.0, TARGETS: [q, v, fc1]}, but MODEL.LORA is {RANK: 2, ALPHA: 2.0, " in done.err
    done = vitamp(*once, "-output", tmp_path / "b", "MODEL.LORA.RANK=null", code=0)
    assert "trained from now on (MODEL.LORA): 18 tensors" in done.out
    whole = load_file(step(tmp_path / "b", 2 * PER_EPOCH + 1) / "model.safetensors")
    before = dict(open_tensors(inspect(step(place / "run"))))
    assert whole.keys() == before.keys()
    name = "blocks.0.attn.qkv.weight"
    assert 0 < (whole[name] - before[name]).abs().max() < 0.02, "one update from the merged weights"
