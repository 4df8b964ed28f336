"""Loading a trained model from a run, a checkpoint or stripped weights, and errors of wrong paths."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.nn.functional as F
from safetensors import safe_open

from engine.amp.low_precision import forced_modules
from engine.trained.model import guesses, load_trained
from tests.predicted import Predictions, validation_predictions
from tests.program import Vitamp, change_meta, metrics, write_meta
from tests.saved import save_checkpoint
from tools.checkpoint import command as checkpoint
from utils.errors import TrainingError, UserError
from vitamp.checkpoints import MODEL
from vitamp.metrics import AVERAGE, PLAIN
from vitamp.weights import chosen_at

EMA = AVERAGE.file

BEST = "step-000000088"


def share(predictions: Predictions) -> float:
    hits = predictions.guesses()[:, 0] == predictions.labels
    return 100 * int(hits.sum()) / len(predictions)


def logits(path: Path, **how: Any) -> torch.Tensor:
    return validation_predictions(load_trained(path, **how), workers=0).logits


def alone(run: Path, place: Path) -> Path:
    """A checkpoint that was copied out of its run, under another name."""
    shutil.copytree(run / "checkpoints" / BEST, place)
    return place


@pytest.fixture(scope="module")
def stripped(digits_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("stripped") / "mine.safetensors"
    assert checkpoint.main(["strip", str(digits_run), "-out", str(path)]) == 0
    return path


def test_predictions_equal_validation_of_a_distilled_model(vitamp: Vitamp, tiny: Path, tmp_path: Path) -> None:
    """Dropped tokens, modules in fp32 and black-listed operators act as in training's own validation."""
    special = ("-amp", "fp16", "AMP.FP32_MODULES=blocks.0.mlp", "AMP.CUSTOM_BLACK_LIST=matmul,softmax")
    words = (*special, "TRAIN.TOKEN_DROP=0.25", "MODEL.NAME=deit_tiny_distilled_patch16_224")
    vitamp("-cfg", tiny, "-output", tmp_path / "run", *words, code=0)
    trained = load_trained(tmp_path / "run")
    assert trained.chosen.which == PLAIN
    assert type(trained.model).__name__ == "VisionTransformerDistilled"
    assert forced_modules(trained.model) == ["blocks.0.mlp"]
    found = validation_predictions(trained, workers=0)
    validated = metrics(tmp_path / "run", "val")[-1]
    loss = F.cross_entropy(found.logits, found.labels, reduction="none").double().mean()
    assert (share(found), float(loss)) == (validated["acc1"], pytest.approx(validated["loss"], rel=1e-12))


def test_weights_are_the_better_ones_or_as_named(digits_run: Path) -> None:
    validated = metrics(digits_run, "val")[-1]
    assert validated["acc1"] > validated["ema_acc1"], "the EMA of a run this short lags behind"
    folder = digits_run / "checkpoints" / BEST
    assert [load_trained(path).chosen.which for path in (digits_run, folder, folder / "meta.json")] == [PLAIN] * 3
    assert load_trained(folder / EMA).chosen.which == AVERAGE, "a file that is named is the one meant"
    trained = load_trained(folder, "model")
    before = {name: tensor.clone() for name, tensor in trained.model.state_dict().items()}
    trained.take(AVERAGE)
    saved = safetensors.torch.load_file(folder / EMA)
    for name, tensor in trained.model.state_dict().items():
        assert torch.equal(tensor, saved[name])
    assert any(not torch.equal(before[name], saved[name]) for name in saved)


def test_checkpoint_or_weights_alone_can_be_loaded(digits_run: Path, stripped: Path, tmp_path: Path) -> None:
    inside = logits(digits_run)
    outside = load_trained(alone(digits_run, tmp_path / "mine"))
    assert outside.chosen.classes == [str(digit) for digit in range(10)]
    assert torch.equal(validation_predictions(outside, workers=0).logits, inside)
    weights = load_trained(stripped)
    assert (weights.chosen.which, weights.chosen.classes) == (PLAIN, outside.chosen.classes)
    assert torch.equal(validation_predictions(weights, workers=0).logits, inside)


def test_kernel_that_a_run_forced_on_its_gpu_is_not_asked_for_here(digits_run: Path, tmp_path: Path) -> None:
    meta = alone(digits_run, tmp_path / "mine") / "meta.json"
    told = json.loads(meta.read_text())
    told["settings"]["SPEED"], told["choices"]["computed_in"] = ["+flash", "-linear_patches"], "cuda bf16"
    write_meta(meta, told)
    assert load_trained(meta.parent).config.SPEED == ["-linear_patches"]


def test_modules_moved_to_fp32_stay_in_fp32(digits_run: Path, tmp_path: Path) -> None:
    source = digits_run / "checkpoints" / BEST
    meta = json.loads((source / "meta.json").read_text(encoding="utf-8"))
    tensors = {MODEL: safetensors.torch.load_file(source / MODEL)}
    more = {key: meta[key] for key in meta if key not in ("format", "files")}
    folder = save_checkpoint(tmp_path, 88, tensors, {"fp32_modules": ["blocks.0.attn"]}, more)
    assert forced_modules(load_trained(folder).model) == ["blocks.0.attn"]
    assert forced_modules(load_trained(folder, amp="off").model) == [], "nothing is in low precision there"
    assert checkpoint.main(["strip", str(folder), "-out", str(tmp_path / "w.safetensors")]) == 0
    assert forced_modules(load_trained(tmp_path / "w.safetensors").model) == ["blocks.0.attn"]


@pytest.mark.parametrize(
    ("words", "which"),
    [("ema", "ema"), ("average of the EMA", "ema"), ("average of the model's weights", "model"), ("a schema", "model")],
)
def test_header_says_which_weights_a_file_has(stripped: Path, tmp_path: Path, words: str, which: str) -> None:
    """In the words of export, strip and average."""
    with safe_open(str(stripped), framework="pt") as file:
        header = {**file.metadata(), "weights": words}
    safetensors.torch.save_file(safetensors.torch.load_file(stripped), tmp_path / "w.safetensors", metadata=header)
    assert chosen_at(tmp_path / "w.safetensors").which.name == which


def test_precision_is_the_runs_or_as_given(digits_run: Path) -> None:
    names = [load_trained(digits_run, amp=amp).precision.name for amp in (None, "off", "fp16", "on", "O3-fp16")]
    assert names == ["bf16", "fp32", "fp16", "bf16", "O3-fp16"]
    images = torch.zeros(2, 1, 8, 8, dtype=torch.uint8)
    low, full = (load_trained(digits_run, amp=amp).logits(images) for amp in ("bf16", "off"))
    assert low.dtype == torch.float32
    assert not torch.equal(low, full)
    assert torch.allclose(low, full, atol=0.05)


def test_out_of_memory_is_reported_with_advice(digits_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained = load_trained(digits_run)

    def fail(images: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {len(images)} GiB.")

    monkeypatch.setattr(trained.model, "forward", fail)
    with pytest.raises(TrainingError, match=r"out of memory with 2 images at once.*-batch_size"):
        trained.logits(torch.zeros(2, 1, 8, 8, dtype=torch.uint8))


def test_guesses_break_ties_as_validation() -> None:
    equal = torch.zeros(1, 12)
    equal[0, 7] = 1.0
    five = equal.topk(5).indices
    assert guesses(equal, 3).tolist() == five[:, :3].tolist()
    assert guesses(equal, 9)[:, :5].tolist() == five.tolist()
    assert sorted(guesses(equal, 99)[0].tolist()) == list(range(12))


def test_unloadable_paths_are_refused(digits_run: Path, tmp_path: Path) -> None:
    damaged = alone(digits_run, tmp_path / "damaged")
    (damaged / EMA).write_bytes((damaged / EMA).read_bytes()[:-1] + b"?")
    newer = alone(digits_run, tmp_path / "newer")
    change_meta(newer, settings={"MODEL.NAME": "tiny", "MODEL.WARP": 9})
    without = alone(digits_run, tmp_path / "without")
    files = json.loads((without / "meta.json").read_text(encoding="utf-8"))["files"]
    change_meta(without, files={name: seal for name, seal in files.items() if name != EMA})
    safetensors.torch.save_file({"head.weight": torch.ones(3)}, tmp_path / "foreign.safetensors")
    (tmp_path / "short.safetensors").write_bytes(b"abc")
    torch.save({}, tmp_path / "x.pth")
    (tmp_path / "empty").mkdir()
    wrong: tuple[tuple[Path, dict[str, Any], str], ...] = (
        (tmp_path / "nothing", {}, "no such file or folder"),
        (tmp_path / "empty", {}, "no checkpoint found"),
        (damaged, {"weights": "ema"}, f"the contents of {EMA} are not what was written"),
        (newer, {}, "MODEL.NAME: .tiny. is not a timm model"),
        (without, {"weights": "ema"}, r"no EMA \(TRAIN.MODEL_EMA\) weights; use -weights model"),
        (tmp_path / "foreign.safetensors", {}, "its header was not written by `python scripts/checkpoint.py strip`"),
        (tmp_path / "short.safetensors", {}, "cannot be read as safetensors"),
        (tmp_path / "x.pth", {}, "weights without a description of their model"),
        (digits_run, {"amp": "fp7"}, "its values are auto off fp16"),
    )
    for path, how, said in wrong:
        with pytest.raises(UserError, match=said):
            load_trained(path, **how)
    assert load_trained(damaged).chosen.which == PLAIN, "what is not used is not in the way"
