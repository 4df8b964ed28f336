"""Settings that the data and the weights give, where the user set none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from engine.inputs.normalize import Inputs
from engine.resolve import resolve
from utils.config import Loaded, load_config
from utils.errors import UserError

DEIT = "deit_small_patch16_224.fb_in1k"
SQUASHED = "vit_base_patch16_clip_384.openai_ft_in1k"
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def resolved(**words: str) -> Loaded:
    words = {"DATA.DATASET": "digits"} | {key.replace("__", "."): value for key, value in words.items()}
    return resolve(load_config(None, words=words))


def notes(**words: str) -> str:
    return "\n".join(resolved(**words).notes)


def test_a_name_of_timm_brings_its_preprocessing() -> None:
    loaded = resolved(MODEL__PRETRAINED=DEIT)
    data = loaded.config.DATA
    assert (data.IMAGENET_MEAN, data.IMAGENET_STD, data.CROP_PCT, data.IMAGE_SIZE) == (MEAN, STD, 0.9, 224)
    assert loaded.sources["DATA.CROP_PCT"] == f"timm's {DEIT}"
    pixels = torch.randint(0, 256, (2, 3, 4, 4), dtype=torch.uint8)
    expected = (pixels / 255 - torch.tensor(MEAN).view(3, 1, 1)) / torch.tensor(STD).view(3, 1, 1)
    assert torch.allclose(Inputs(data)(pixels), expected, atol=1e-6)


def test_without_weights_nothing_is_resolved() -> None:
    loaded = load_config(None, words={"DATA.DATASET": "digits"})
    assert resolve(loaded) == loaded


def test_the_defaults_of_a_family_are_not_the_users() -> None:
    data = resolved(MODEL__TYPE="deit", MODEL__PRETRAINED="vit_base_patch16_224.augreg_in21k").config.DATA
    assert data.IMAGENET_MEAN == (0.5, 0.5, 0.5)


def test_a_set_value_is_kept_and_the_difference_noted() -> None:
    words = {"MODEL__PRETRAINED": DEIT, "DATA__IMAGENET_MEAN": "0.5", "DATA__IMAGE_SIZE": "192"}
    loaded = resolved(**words)
    assert (loaded.config.DATA.IMAGENET_MEAN, loaded.config.DATA.IMAGE_SIZE) == ((0.5,), 192)
    said = "\n".join(loaded.notes)
    assert f"command line: DATA.IMAGENET_MEAN [0.5] is used; timm's {DEIT} has [0.485, 0.456, 0.406]" in said
    assert f"command line: DATA.IMAGE_SIZE 192 is used; timm's {DEIT} has 224" in said
    assert "is used" not in notes(MODEL__PRETRAINED="vit_base_patch16_224.augreg_in21k", DATA__IMAGENET_MEAN="0.5")


def test_crop_mode_of_weights_is_taken_but_not_by_an_older_run(tmp_path: Path) -> None:
    """Runs from before DATA.CROP_MODE cropped the centre, whatever their weights say."""
    assert resolved(MODEL__PRETRAINED=SQUASHED).config.DATA.CROP_MODE == "squash"
    (tmp_path / "config.yaml").write_text(f"MODEL: {{PRETRAINED: {SQUASHED}}}\n")
    (tmp_path / "metrics.jsonl").touch()
    words = {"DATA.DATASET": "digits", "MODEL.RESUME": str(tmp_path), "MODEL.PRETRAINED": SQUASHED}
    older = resolve(load_config(None, words=words))
    assert older.config.DATA.CROP_MODE == "center"
    assert f"DATA.CROP_MODE center is used, as in the resumed run; timm's {SQUASHED} has squash" in older.notes


def test_grey_images_get_the_mean_over_colours() -> None:
    data = resolved(MODEL__PRETRAINED=DEIT, DATA__IMAGE_CHANNELS="1").config.DATA
    assert (sum(MEAN) / 3,) == data.IMAGENET_MEAN


def test_an_interpolation_that_is_not_supported_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    import timm

    cfg = timm.get_pretrained_cfg(DEIT)
    assert cfg is not None
    cfg.interpolation = "nearest"
    monkeypatch.setattr(timm, "get_pretrained_cfg", lambda _: cfg)
    loaded = resolved(MODEL__PRETRAINED=DEIT)
    assert loaded.config.DATA.INTERPOLATION == "bicubic"
    words = f"DATA.INTERPOLATION bicubic is used; timm's {DEIT} has nearest, which is not supported"
    assert words in "\n".join(loaded.notes)


def test_files_bring_what_is_written_in_them_or_beside_them(tmp_path: Path) -> None:
    tensors = {"a": torch.zeros(1)}
    fields = {"image_size": 64, "mean": [0.1, 0.2, 0.3], "std": [0.4, 0.5, 0.6], "crop_pct": 0.7}
    save_file(tensors, tmp_path / "header.safetensors", metadata={"input": json.dumps(fields)})
    run = tmp_path / "step-1"
    run.mkdir()
    save_file(tensors, run / "model.safetensors")
    (run / "meta.json").write_text(json.dumps({"input": fields}))
    for place in (tmp_path / "header.safetensors", run, run / "model.safetensors"):
        data = resolved(MODEL__PRETRAINED=str(place)).config.DATA
        assert (data.IMAGE_SIZE, data.IMAGENET_MEAN, data.CROP_PCT) == (64, (0.1, 0.2, 0.3), 0.7)
    save_file(tensors, tmp_path / f"{DEIT}.safetensors")
    assert resolved(MODEL__PRETRAINED=str(tmp_path / f"{DEIT}.safetensors")).config.DATA.IMAGENET_MEAN == MEAN
    save_file(tensors, tmp_path / "mine.safetensors")
    said = notes(MODEL__PRETRAINED=str(tmp_path / "mine.safetensors"))
    assert (
        "mine.safetensors: the preprocessing of its training images is unknown; this run uses DATA.IMAGE_SIZE" in said
    )


def test_damaged_preprocessing_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(1)}, tmp_path / "model.safetensors")
    (tmp_path / "meta.json").write_text('{"input": {"mean": "grey"}}')
    with pytest.raises(UserError, match=r"meta\.json: damaged, mean"):
        resolved(MODEL__PRETRAINED=str(tmp_path))
    (tmp_path / "meta.json").write_text('{"input": {"mean": [0.1, 0.2]}}')
    with pytest.raises(UserError, match=r"meta\.json: DATA\.IMAGENET_MEAN: \[0\.1, 0\.2\] has 2 numbers"):
        resolved(MODEL__PRETRAINED=str(tmp_path))


def test_auto_classes_are_counted_and_named() -> None:
    loaded = resolved(MODEL__NUM_CLASSES="auto", DATA__IMAGE_CHANNELS="1")
    assert loaded.config.MODEL.NUM_CLASSES == 10
    assert "MODEL.NUM_CLASSES 10: classes of digits" in loaded.notes
    with_path = resolved(MODEL__NUM_CLASSES="auto", DATA__IMAGE_CHANNELS="1", DATA__DATA_PATH="/data")
    assert "MODEL.NUM_CLASSES 10: classes of digits" in with_path.notes, "which are not in /data"
