"""-cfg NAME finds the recipes that come with vitamp."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.program import ROOT
from utils.config import load_config
from utils.errors import UserError


def error_of(cfg: str) -> str:
    with pytest.raises(UserError) as caught:
        load_config(cfg)
    return str(caught.value)


def test_name_finds_the_recipe_and_its_base_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = ROOT / "configs" / "vit_base_patch16_224.yaml"
    monkeypatch.chdir(ROOT)
    by_path = load_config("configs/vit_base_patch16_224.yaml")
    assert by_path.sources == load_config("vit_base_patch16_224").sources
    monkeypatch.chdir(tmp_path)
    (tmp_path / "vit_base_patch16_224").mkdir()  # such as the folder of a run
    by_name = load_config("vit_base_patch16_224")
    assert by_name.config == by_path.config
    assert by_name.notes == (f"-cfg vit_base_patch16_224: {path}, a recipe that comes with vitamp", *by_path.notes)
    assert any("_vit_imagenet.yaml" in source for source in by_name.sources.values()), "BASE"


def test_file_of_this_name_comes_first_and_a_warning_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "vit_synthetic").write_text("SED: 7\n")
    assert "unknown key SED" in error_of("vit_synthetic")
    assert "-cfg vit_synthetic: the file vit_synthetic in the current folder is used, not the recipe" in caplog.text
    (tmp_path / "vit_digits").write_text("SEED: 7\n")
    loaded = load_config("vit_digits")
    assert (loaded.config.SEED, loaded.sources["SEED"]) == (7, "vit_digits:1")
    assert not any("comes with vitamp" in note for note in loaded.notes)
    warned = f"not the recipe of this name that comes with vitamp ({ROOT / 'configs' / 'vit_digits.yaml'})"
    assert caplog.text.count(warned) == 1
    (tmp_path / "mine").write_text("SEED: 7\n")
    caplog.clear()
    load_config("mine")
    assert not caplog.text


def test_unknown_names_are_refused_with_the_closest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    said = error_of("vit_bas_patch16_224")
    assert said.startswith(
        "-cfg vit_bas_patch16_224: no such file, and no recipe of this name. Did you mean vit_base_p"
    )
    assert said.endswith(f"The recipes are in {ROOT / 'configs'}; {ROOT / 'docs/recipes.md'} describes them.")
    assert "Did you mean" not in error_of("qqq").replace(str(ROOT), "")
    assert error_of("_finetune").startswith("-cfg _finetune: no such file"), "a part of others"
    for path in ("vit_digits.yaml", "configs/vit_digits.yaml"):
        hint = "Did you mean -cfg vit_digits, a recipe that comes with vitamp?"
        assert error_of(path) == f"{path}: no such file. {hint}"
    assert error_of("gone/vit_digits") == "gone/vit_digits: no such file. The folder gone does not exist either."
