"""scripts/export.py -push: a model is uploaded to a stand-in for the Hugging Face Hub, or refused before any work."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import huggingface_hub
import pytest

from engine.trained.model import load_trained
from tests.predicted import validation_predictions
from tests.program import Result
from tests.tools.hub_server import TOKEN, FakeHub, serving_hub
from tests.tools.timm_alone import Tool, check_equal, in_timm_alone, pictures_of


@pytest.fixture
def fake_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeHub]:
    """A Hub for the tool in this process."""
    with serving_hub() as hub:
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", hub.url)
        for key, value in hub.env(tmp_path / "home").items():
            monkeypatch.setenv(key, value)
        yield hub


@pytest.mark.slow
def test_pushed_model_is_loaded_from_the_hub(vitamp: Callable[..., Result], digits_run: Path, tmp_path: Path) -> None:
    """Processes of their own, which find the Hub by HF_ENDPOINT."""
    with serving_hub() as hub:
        env, folder = hub.env(tmp_path / "home"), tmp_path / "digits"
        words = (digits_run, "-to", "hub", "-output", folder, "-check", 8, "-weights", "model", "-push", "me/digits")
        done = vitamp(*words, script="scripts/export.py", env=env, slow_start=True)
        assert done.code == 0, done.text
        assert f"-push me/digits: the repository does not exist on {hub.url}; it will be created, private" in done.text
        assert f"{hub.url}/me/digits: pushed, private" in done.text
        assert 'timm.create_model("hf-hub:me/digits", pretrained=True)' in done.text
        assert TOKEN not in done.text
        assert hub.visibility == {"me/digits": "private"}
        assert hub.messages == ["Upload digits, exported by vitamp"]
        assert hub.files["me/digits"] == {path.name: path.read_bytes() for path in folder.iterdir()}
        assert b'create_model("hf-hub:me/digits"' in hub.files["me/digits"]["README.md"]
        found = validation_predictions(load_trained(digits_run, "model", device="cpu", amp="off"))
        paths = pictures_of(found, tmp_path)
        logits, _ = in_timm_alone("hf-hub:me/digits", "L", paths, tmp_path, env | {"HF_HUB_DISABLE_XET": "1"})
        check_equal(found, logits)


def test_public_and_existing_repositories(
    export_tool: Tool, digits_run: Path, fake_hub: FakeHub, tmp_path: Path
) -> None:
    words = (digits_run, "-to", "hub", "-output", tmp_path / "vit", "-check", 2, "-push", "museum/vit")
    code, said = export_tool(*words, "-public")
    assert code == 0, said
    assert "it will be created, public (-public)" in said
    assert fake_hub.visibility == {"museum/vit": "public"}
    number = len(fake_hub.messages)
    before = fake_hub.requests.copy()
    code, said = export_tool(digits_run, "-to", "hub", "-output", tmp_path / "other", "-push", "museum/vit")
    assert code == 2
    assert "the repository already has README.md, config.json, curves.png, model.safetensors" in said
    assert not (tmp_path / "other").exists()
    assert not [line for line in fake_hub.requests[len(before) :] if line.startswith("POST")], "nothing was changed"
    code, said = export_tool(*words, "-overwrite")
    assert code == 0, said
    assert "the repository exists and stays public" in said
    assert len(fake_hub.messages) == number + 1


@pytest.mark.parametrize(
    ("name", "env", "role", "expected"),
    [
        ("me/vit", {"HF_TOKEN": ""}, "write", "there is no token for the Hugging Face Hub"),
        ("me/vit", {"HF_TOKEN": "hf_wrong"}, "write", "the request to http"),
        ("me/vit", {}, "read", "the token of me can only read"),
        ("you/vit", {}, "write", "the token cannot write to you; it can write to me, museum"),
        ("me/a--b", {}, "write", "Cannot have -- or .. in repo_id"),
    ],
)
def test_push_that_cannot_succeed_is_refused_before_any_work(
    export_tool: Tool,
    fake_hub: FakeHub,
    digits_run: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    env: dict[str, str],
    role: str,
    expected: str,
) -> None:
    fake_hub.role = role
    for key, value in env.items():
        monkeypatch.setenv(key, value)
    code, said = export_tool(digits_run, "-to", "hub", "-output", tmp_path / "vit", "-push", name)
    assert code == 2
    assert f"-push {name}: " in said
    assert expected in said
    assert "plain weights" not in said, "the run was not even loaded"
    assert not (tmp_path / "vit").exists()
    assert fake_hub.files == {}


def test_failed_upload_keeps_the_folder(export_tool: Tool, digits_run: Path, fake_hub: FakeHub, tmp_path: Path) -> None:
    fake_hub.refuse = "/commit/"
    folder = tmp_path / "vit"
    code, said = export_tool(digits_run, "-to", "hub", "-output", folder, "-check", 2, "-push", "me/vit")
    assert code == 1
    assert "-push me/vit: the upload failed (storage quota exceeded)" in said
    assert f"{folder} is complete and checked" in said
    assert (folder / "config.json").exists()
