"""What docs/migrating.md says of other programs."""

import re
from typing import Any

import timm
import torch

from tests.documents import blocks, commands
from tests.program import ROOT
from tests.utils.test_paddlevit_table import FILES
from utils.cli import parse
from utils.config import Config, load_config
from utils.config.keys import default_of
from utils.precisions import amp_settings_of


def defaults_rows() -> dict[str, list[str]]:
    """Key -> what here, PaddleViT, timm and torchvision do without flags, by the first table of the page."""
    page = (ROOT / "docs" / "migrating.md").read_text(encoding="utf-8")
    (section,) = [part for part in page.split("\n## ") if part.startswith("Defaults that differ")]
    cells = [[cell.strip() for cell in line.split("|")[2:-1]] for line in section.splitlines() if line.startswith("| ")]
    return {row[0].strip("`"): row[1:] for row in cells if row[0].startswith("`")}


def test_our_column_of_the_defaults_is_the_schemas() -> None:
    rows = defaults_rows()
    assert len(rows) >= 18
    for key, (ours, *_) in rows.items():
        value = default_of(key)
        first = value[0] if key == "DATA.CROP_SCALE" else value
        shown = {True: "true", False: "false", None: "null"}.get(first) if first in (True, False, None) else None
        if isinstance(first, (int, float)) and not isinstance(first, bool):
            assert float(ours.split()[0]) == first, key
        elif isinstance(first, (list, tuple)):
            assert [float(part) for part in ours.split(",")] == list(first), key
        else:
            assert ours.split()[0].rstrip(",") == (shown or str(first)), key


def test_counts_of_paddlevits_files_are_those_that_load() -> None:
    page = (ROOT / "docs" / "migrating.md").read_text(encoding="utf-8")

    def counted(year: str, folder: str = "") -> str:
        rows = [row for row in FILES if year in row["at"] and row["file"].startswith(folder)]
        return f"{sum('built' in row for row in rows)} of {len(rows)}"

    section = page.partition("### Other families")[2].partition("###")[0]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in section.splitlines() if line.startswith("| ")]
    assert len(rows) == 19
    for title, _, shown, *_ in rows[1:]:
        assert shown == counted("today", f"{title}/"), title
    words = " ".join(page.split())
    assert (
        f"of today's {len([row for row in FILES if 'today' in row['at']])} files {counted('today').split()[0]},"
        in words
    )
    assert f"page on AMP) {counted('2021-11')}." in words


def test_precisions_of_other_programs_are_ours() -> None:
    page = (ROOT / "docs" / "migrating.md").read_text(encoding="utf-8")
    words = re.findall(r"\| `-amp` \| ((?:`[\w-]+`,? ?)+)", page)
    for value in re.findall(r"`([\w-]+)`", " ".join(words)):
        assert amp_settings_of(value) is not None, value
    assert len(words) >= 3


def test_each_amp_word_of_the_pages_tables_is_taken() -> None:
    pages = (ROOT / "README.md", ROOT / "docs" / "amp.md", ROOT / "docs" / "migrating.md")
    cells = [line for page in pages for line in page.read_text(encoding="utf-8").splitlines() if line.startswith("|")]
    words = re.findall(r"`-amp ([\w-]+)`", " ".join(cells))
    assert len(words) >= 4
    assert [word for word in words if amp_settings_of(word) is None] == []


def worked(part: str) -> Config:
    """The settings of the command a user of another program is given instead of theirs."""
    texts = [block.text for block in blocks() if block.page == "docs/migrating.md" and block.mark != "not checked"]
    (words,) = [words for text in texts for words in commands(text) if part in " ".join(words)]
    command = parse(words[1:], words[0])
    return load_config(command.cfg and str(ROOT / command.cfg), command.flags, command.words).config


def test_the_worked_command_from_paddlevit_trains_with_its_numbers() -> None:
    train, model = worked("ATTENTION_DROPOUT").TRAIN, worked("ATTENTION_DROPOUT").MODEL
    assert (train.BASE_LR, train.LINEAR_SCALED_LR, train.WEIGHT_DECAY, train.WEIGHT_DECAY_ALL) == (
        3e-3,
        None,
        0.3,
        True,
    )
    assert (train.WARMUP_EPOCHS, train.GRAD_CLIP, model.DROPOUT, model.ATTENTION_DROPOUT) == (32, 1.0, 0.1, 0.1)
    without = load_config(str(ROOT / "configs" / "vit_base_patch16_224.yaml")).config
    assert (without.TRAIN.LINEAR_SCALED_LR, without.MODEL.ATTENTION_DROPOUT) == (4096, 0.0)


def test_the_worked_command_from_timm_has_its_defaults() -> None:
    config = worked("runs/base")
    rows = defaults_rows()
    for key in ("TRAIN.WARMUP_EPOCHS", "TRAIN.WARMUP_START_LR", "TRAIN.COLOR_JITTER", "TRAIN.SMOOTHING", "SEED"):
        section, _, name = key.rpartition(".")
        assert getattr(getattr(config, section) if section else config, name) == float(rows[key][2]), key
    assert (config.TRAIN.LINEAR_SCALED_LR, config.DATA.CROP_SCALE[0], config.DATA.CROP_PCT) == (None, 0.08, 0.9)


def test_the_worked_command_from_torchvision_has_its_defaults() -> None:
    config = worked("runs/resnet50")
    rows = {key: row[3] for key, row in defaults_rows().items()}
    assert float(rows["TRAIN.BASE_LR"]) == config.TRAIN.BASE_LR
    assert float(rows["TRAIN.WEIGHT_DECAY"]) == config.TRAIN.WEIGHT_DECAY
    assert (config.TRAIN.NUM_EPOCHS, config.DATA.BATCH_SIZE) == (90, 32)
    assert list(config.DATA.IMAGENET_MEAN) == [float(part) for part in rows["DATA.IMAGENET_MEAN"].split(",")]
    assert (config.DATA.INTERPOLATION, config.TRAIN.LR_SCHEDULER.DECAY_EPOCHS) == ("bilinear", 30)


def test_parameters_of_coat_are_those_of_the_page() -> None:
    page = (ROOT / "docs" / "migrating.md").read_text(encoding="utf-8")
    row = next(line for line in page.splitlines() if line.startswith("| CoaT "))
    here, there = (re.findall(r"\d+\.\d\d", part) for part in row.split(" million parameters"))
    for name, ours, theirs in zip(("coat_tiny", "coat_mini", "coat_small"), here, there, strict=True):
        with torch.device("meta"):
            model: Any = timm.create_model(name)
        parameters = sum(weight.numel() for weight in model.parameters())
        each = [sum(weight.numel() for weight in block.mlp2.parameters()) for block in model.parallel_blocks]
        assert all(block.mlp2 is block.mlp3 is block.mlp4 for block in model.parallel_blocks)
        assert (f"{parameters / 1e6:.2f}", f"{(parameters + 2 * sum(each)) / 1e6:.2f}") == (ours, theirs)
