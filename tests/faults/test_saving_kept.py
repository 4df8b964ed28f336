"""Which checkpoints a run keeps: the last, the best by a chosen figure, some for ever; and which -resume takes."""

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.checkpoint.find import newest_good
from tests.program import Calls, Vitamp, made_meta, metrics, write_meta
from tests.saved import names, save_checkpoint
from vitamp.checkpoints import MODEL, STATE, folder_name, read_index


@pytest.mark.parametrize(("by", "better"), [("acc5", max), ("balanced_acc", max), ("loss", min)])
def test_the_best_by_another_figure(
    vitamp: Vitamp, tiny: Path, tmp_path: Path, by: str, better: Callable[..., float]
) -> None:
    given = (f"SAVE_BEST_BY={by}", "TRAIN.NUM_EPOCHS=5", "TRAIN.MODEL_EMA=true", "TRAIN.BASE_LR=0.3", "KEEP_LAST=1")
    done = vitamp("-cfg", tiny, "-output", tmp_path / "run", *given, "TRAIN.GRAD_CLIP=null", code=0)
    figures = {line["update"]: better(line[by], line[f"ema_{by}"]) for line in metrics(tmp_path / "run", "val")}
    best = better(figures.values())
    index = read_index(tmp_path / "run" / "checkpoints")
    assert index["best"] == folder_name(min(update for update, figure in figures.items() if figure == best))
    assert set(names(tmp_path / "run" / "checkpoints")) == {index["best"], index["last"]}
    words = {"acc5": "top-5 {:.2f} %", "balanced_acc": "balanced accuracy {:.2f} %", "loss": "loss {:.4f}"}
    assert words[by].format(best) in done.out.splitlines()[-1]


def test_a_best_that_the_disk_refuses_does_not_count(vitamp: Vitamp, tiny: Path, tmp_path: Path) -> None:
    """A link without a target blocks the first; with learning rate 0, the second is no better."""
    root = tmp_path / "run" / "checkpoints"
    root.mkdir(parents=True)
    (root / folder_name(44)).symlink_to("nowhere")
    words = ("TRAIN.NUM_EPOCHS=2", "TRAIN.BASE_LR=0", "TRAIN.WARMUP_START_LR=0", "-resume", "auto")
    done = vitamp("-cfg", tiny, "-output", tmp_path / "run", *words, code=0)
    assert "Best so far: no validation yet. Lost with its checkpoint: top-1" in done.err
    assert read_index(root)["best"] == folder_name(88)


def test_some_epochs_are_kept_for_ever(vitamp: Vitamp, tiny: Path, tmp_path: Path) -> None:
    words = ("TRAIN.NUM_EPOCHS=7", "KEEP_EVERY=2", "KEEP_LAST=1", "SAVE_FREQ=3", "VALIDATE_FREQ=100")
    vitamp("-cfg", tiny, "-output", tmp_path / "run", *words, code=0)
    assert names(tmp_path / "run" / "checkpoints") == [folder_name(44 * epoch) for epoch in (2, 4, 6, 7)]


def test_one_of_fifty_is_hashed_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    many = tmp_path / "run" / "checkpoints"
    for update in range(1, 51):
        save_checkpoint(many, update, {MODEL: {"weight": torch.zeros(2500)}}, {}, made_meta(update))
    (many / folder_name(50) / MODEL).unlink()
    (many / folder_name(49) / STATE).write_bytes(b"short")
    hashed, digest = [], hashlib.file_digest

    def counting(file: Any, kind: Any) -> Any:
        hashed.append(Path(file.name))
        return digest(file, kind)

    monkeypatch.setattr(hashlib, "file_digest", counting)
    found = newest_good(many)
    assert found is not None
    assert found.folder == many / folder_name(48)
    assert sorted(hashed) == [found.folder / MODEL, found.folder / STATE], "not those of a wrong size, not the others"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("vit.pdparams", "this is a PaddleViT checkpoint; -resume takes only runs of vitamp"),
        ("vit", "/vit.pdparams"),
        ("deit.pth", "Start a new run from these weights: -pretrained"),
        ("mine.safetensors", "Start a new run from these weights: -pretrained"),
    ],
)
def test_what_is_no_run_says_what_to_do(vitamp: Vitamp, tiny: Path, tmp_path: Path, name: str, said: str) -> None:
    for file in ("vit.pdparams", "vit.pdopt", "deit.pth", "mine.safetensors"):
        (tmp_path / file).write_bytes(b"weights")
    done = vitamp("-cfg", tiny, "-output", tmp_path / "run", "-resume", tmp_path / name, code=2)
    assert said in done.err


def test_a_checkpoint_that_would_run_code_is_refused(vitamp: Vitamp, tiny: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert vitamp("-cfg", tiny, "-output", run, "TRAIN.MAX_UPDATES=2").code == 0
    folder = run / "checkpoints" / folder_name(2)
    torch.save({"optimizer": Calls(os.mkdir, str(tmp_path / "harm"))}, folder / STATE)
    # The right size and hash: whoever can write the one can write the others.
    content = json.loads((folder / "meta.json").read_text())
    data = (folder / STATE).read_bytes()
    content["files"][STATE] = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    write_meta(folder / "meta.json", content)
    done = vitamp("-resume", run, code=2)
    assert f"{folder / STATE}: cannot be read" in done.err
    assert not (tmp_path / "harm").exists()
