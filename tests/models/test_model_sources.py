"""Checks of pretrained weights before a model is built."""

import json
import time
import zipfile
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from safetensors.torch import save_file

from models.build import build_model
from models.weights.find import locate
from models.weights.fit import load_pretrained
from utils.config.model import ModelConfig
from utils.errors import UserError

HUB_NAME = "vit_tiny_patch16_224.augreg_in21k"


def refusal(source: Path | str) -> str:
    with pytest.raises(UserError) as caught:
        locate(str(source), download=False)
    return str(caught.value)


@pytest.fixture
def no_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    return tmp_path / "hub"


def test_missing_weights_are_refused_with_the_closest_name(tmp_path: Path) -> None:
    (tmp_path / "vit_base.pth").touch()
    assert "no such file. Did you mean vit_base.pth?" in refusal(tmp_path / "vit_bse.pth")
    assert f"there is no folder {tmp_path / 'nowhere'}" in refusal(tmp_path / "nowhere" / "w.pth")
    assert "no such file" in refusal("surely-not-here.safetensors")


def test_pdparams_are_found_with_or_without_extension(tmp_path: Path) -> None:
    (tmp_path / "vit.pdparams").write_bytes(b"no pickle")
    for name in ("vit.pdparams", "vit"):  # PaddleViT's command lines omit the extension
        assert "vit.pdparams: the file is damaged" in refusal(tmp_path / name)
    (tmp_path / "vit.pdparams").write_bytes(b"\x80\x04}.")
    locate(str(tmp_path / "vit"), download=False)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("w.safetensors", b"nonsense", "damaged"),
        ("w.safetensors", b"", "damaged"),
        ("w.pth", b"", "damaged"),
        ("w.pth", b"PK\x03\x04 cut off", "damaged"),
        ("w.npz", b"\x80 no zip file", "damaged"),
        *((f"w.{one}", b"version https://git-lfs.github.com/spec/v1\n", "lfs pull") for one in ("pth", "safetensors")),
        ("w.onnx", b"1", "unknown kind of file"),
    ],
)
def test_files_that_are_not_weights_are_refused(tmp_path: Path, name: str, content: bytes, words: str) -> None:
    (tmp_path / name).write_bytes(content)
    said = refusal(tmp_path / name)
    assert str(tmp_path / name) in said
    assert words in said


def test_too_many_tensors_are_refused_unread(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "w.pth", "w") as file:
        for number in range(50_001):
            file.writestr(f"w/data/{number}", b"")
    assert "w.pth: 50,001 entries, more than any model has tensors" in refusal(tmp_path / "w.pth")


def test_folders_without_weights_are_refused(tmp_path: Path) -> None:
    assert "no model.safetensors" in refusal(tmp_path)
    index = tmp_path / "checkpoints" / "index.json"
    index.parent.mkdir()
    index.write_text(json.dumps({"best": "../../elsewhere"}))
    assert f"no checkpoint found (looked for {index.parent}/step-*)" in refusal(tmp_path)


def test_unknown_timm_names_are_refused_with_the_closest() -> None:
    assert "Did you mean vit_base_patch16_224?" in refusal("vit_bas_patch16_224")
    for name in ("vit_tiny", "vit_tny"):
        assert "Did you mean vit_tiny_patch16_224, " in refusal(name)
    assert "Did you mean vit_base_patch16_224.augreg_in21k?" in refusal("vit_base_patch16_224.augreg_in21")
    assert "no weights for it" in refusal("vit_small_patch16_18x2_224")


def test_offline_hub_is_reported_at_once(no_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    started = time.monotonic()
    said = refusal(HUB_NAME.replace(".augreg_", "_"))  # its old name
    assert time.monotonic() - started < 2
    words = (HUB_NAME, f"timm/{HUB_NAME}", str(no_cache), "HF_HUB_OFFLINE", "model.safetensors", "MODEL.PRETRAINED")
    assert all(word in said for word in words), said


def test_unreachable_hub_is_reported(no_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def ask(*_: Any, **__: Any) -> None:
        raise ConnectionError("Name or service not known")

    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", ask)
    said = refusal(HUB_NAME)
    assert "Name or service" in said
    assert str(no_cache) in said


def test_cached_weights_are_loaded_without_asking_the_hub(no_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def ask(*_: Any, **__: Any) -> None:
        raise ConnectionError("asked the hub")

    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", ask)
    settings = ModelConfig(NAME="vit_tiny_patch16_224", NUM_CLASSES=21843)
    donor = build_model(settings, 224, 3)
    # The layout of the hub's cache: a reference names the snapshot that holds the file.
    repo = no_cache / f"models--timm--{HUB_NAME}"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text("abc")
    (repo / "snapshots" / "abc").mkdir(parents=True)
    save_file(donor.state_dict(), repo / "snapshots" / "abc" / "model.safetensors")
    locate(HUB_NAME, download=False)
    ours = build_model(settings.changed(NUM_CLASSES=7), 224, 3)
    said = load_pretrained(ours, HUB_NAME, "vit_tiny_patch16_224")
    assert "head freshly initialised (21843 classes in the file, 7 in the model" in said
    assert torch.equal(ours.state_dict()["pos_embed"], donor.state_dict()["pos_embed"])
