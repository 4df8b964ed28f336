"""The pages in docs/recipes: their command lines, taken from the pages themselves, run on small made-up data."""

import json
import re
import shlex
from pathlib import Path
from typing import NamedTuple

import pytest
import timm
import torch
import yaml
from PIL import Image
from safetensors.torch import load_file, save_file

from tests.program import Vitamp, metrics, save_image
from tools.common.precisions import modes_to_measure
from utils.config import Config, load_config

PAGES = Path(__file__).resolve().parents[1] / "docs" / "recipes"
NAMES = ("caltech101_vit", "caltech256_resnet50", "fleet", "paddlevit", "simplenet")
ONE_EPOCH = ["TRAIN.NUM_EPOCHS=1", "TRAIN.WARMUP_EPOCHS=0", "REPORT_FREQ=1", "THREADS=1", "DATA.NUM_WORKERS=1"]
ON_CPU = ["-device", "cpu"]
SMALL_VIT = ["MODEL.DEPTH=1", "MODEL.EMBED_DIM=32", "MODEL.NUM_HEADS=2", "-image_size", "32"]


class Command(NamedTuple):
    script: str
    words: list[str]
    env: dict[str, str]


def commands(page: str, script: str = "") -> list[Command]:
    """Those of a page's bash blocks, in order; of one script, or all."""
    text = (PAGES / f"{page}.md").read_text(encoding="utf-8")
    found = []
    for block in re.findall(r"```bash\n(.*?)```", text, re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            if not words:
                continue
            start = words.index("python")
            env = dict(word.split("=", 1) for word in words[:start])
            found.append(Command(words[start + 1], words[start + 2 :], env))
    return [one for one in found if script in one.script]


def moved_to(command: Command, root: Path) -> Command:
    """The same with the data below `root`, and what it writes beside them."""
    words = re.sub(r"(?<=[= ])/data(set)?\b", f"{root}/data", " " + " ".join(command.words))
    words = re.sub(r"(?<= )runs/", f"{root}/runs/", words)
    words = re.sub(r"(?<= -output )log\b|(?<= -json )(?=\w)", f"{root}/out/", words)
    return command._replace(words=words.split())


@pytest.fixture
def place(tmp_path: Path, imagenet: Path) -> Path:
    """Made-up trees: Caltech-256 of three classes and clutter, Caltech-101 of three and clutter, lists of ImageNet."""
    data = tmp_path / "data"
    for label, name in enumerate(("001.ak47", "002.american-flag", "003.backpack", "257.clutter")):
        for number in range(1, 11):
            folder = data / "caltech256" / "256_ObjectCategories" / name
            save_image(folder / f"{label + 1:03d}_{number:04d}.jpg", seed=100 * label + number)
    for label, name in enumerate(("BACKGROUND_Google", "Faces", "accordion", "wild_cat")):
        for number in range(1, 11):
            folder = data / "caltech101" / "101_ObjectCategories" / name
            save_image(folder / f"image_{number:04d}.jpg", seed=100 * label + number)
    (data / "imagenet").symlink_to(imagenet)
    (tmp_path / "out").mkdir()
    return tmp_path


def weights(place: Path, name: str) -> Path:
    """Weights as they are fetched: of another number of classes."""
    torch.manual_seed(0)
    file = place / f"{name}.safetensors"
    save_file(timm.create_model(name).state_dict(), file)
    return file


def stood_still(run: Path, before: Path) -> None:
    """Every tensor but the classifier is what it was, statistics of batch norm among them."""
    (newest,) = sorted((run / "checkpoints").glob("step-*"))[-1:]
    after, first = load_file(newest / "model.safetensors"), load_file(before)
    assert after["fc.weight"].shape[0] == 256
    kept = [name for name in after if not name.startswith("fc.")]
    assert len(kept) == len(after) - 2
    assert all(torch.equal(after[name], first[name]) for name in kept)


FLEET: dict[str, object] = {
    "ENABLED": True,
    "INIT_LOSS_SCALING": 32768,
    "DECR_EVERY_N_NAN_OR_INF": 2,
    "INCR_EVERY_N_STEPS": 1000,
    "INCR_RATIO": 2.0,
    "USE_DYNAMIC_LOSS_SCALING": True,
    "DECR_RATIO": 0.5,
    "CUSTOM_WHITE_LIST": [],
    "CUSTOM_BLACK_LIST": [],
}
"""amp_configs as Fleet's page on AMP has them."""


def test_fleets_page_and_recipe_have_fleets_values() -> None:
    page = (PAGES / "fleet.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    printed = yaml.safe_load(block)
    assert printed == {"AMP": FLEET, "LOG_STYLE": "fleet"}
    recipe = load_config(str(PAGES.parents[1] / "configs" / "fleet_amp.yaml")).config
    assert {key: list(value) if (value := getattr(recipe.AMP, key)) == () else value for key in FLEET} == FLEET
    told = dict(re.findall(r"`([A-Z_]+): (\w+)`", page))
    assert told == {
        "LOG_STYLE": recipe.LOG_STYLE,
        "REPORT_FREQ": str(recipe.REPORT_FREQ),
        "DECR_EVERY_N_NAN_OR_INF": "2",
    }
    assert re.search(r"`\[Epoch 0, batch \d+\] loss: \d+\.\d{5}, acc1: \d+\.\d{5}, acc5: \d+\.\d{5}`", page)


def test_a_frozen_backbone_stands_still_by_the_command_line(vitamp: Vitamp, place: Path) -> None:
    """The recipe from folders to classes by their names, on a smaller ResNet."""
    first = weights(place, "resnet10t")
    command = moved_to(commands("caltech256_resnet50", "main_single")[1], place)
    small = ["-pretrained", first, "MODEL.NAME=resnet10t", "-image_size", 64, "-batch_size", 9, *ONE_EPOCH, *ON_CPU]
    done = vitamp(*command.words, *small, script=command.script, code=0)
    run = place / "runs" / "amp_yes"
    stood_still(run, first)
    trained = 512 * 256 + 256
    assert f"({trained:,} trainable" in done.out
    assert "caltech256: 27 training and 3 validation images of 64 x 64 x 3, 256 classes" in done.out
    assert re.search("(bf16|fp16) by autocast|-amp computes in fp32 here", done.text), "as the CPU computes"
    assert metrics(run, "train")[-1]["update"] == 3
    with Image.open(run / "curves.png") as picture:
        assert picture.format == "PNG"
    meta = json.loads(next(run.glob("checkpoints/step-*/meta.json")).read_text(encoding="utf-8"))
    assert meta["classes"] == ["001.ak47", "002.american-flag", "003.backpack"]


@pytest.mark.slow
def test_caltech256(vitamp: Vitamp, place: Path) -> None:
    """Every command of the page with the real ResNet-50: both precisions, the report, the largest batch."""
    first = weights(place, "resnet50")
    small = ["-pretrained", first, "-image_size", 64, *ONE_EPOCH, *ON_CPU]
    page = commands("caltech256_resnet50")
    for command in [moved_to(one, place) for one in page if "main_" in one.script]:
        mine = [] if "-batch_size" in command.words else ["-batch_size", 9]
        mine += [] if "-output" in command.words else ["-output", place / "runs" / f"more{len(command.words)}"]
        mine += ["TRAIN.MEMORY_LIMIT=1.2"] if "auto" in command.words else []
        done = vitamp(*command.words, *mine, *small, script=command.script, timeout=600, code=0)
        assert "24,032,576 parameters (524,544 trainable" in done.out
        assert "total time" in done.out
    for run in ("amp_no", "amp_yes"):
        stood_still(place / "runs" / run, first)
        assert (place / "runs" / run / "curves.png").is_file()
    (report,) = [moved_to(one, place) for one in page if "report" in one.script]
    vitamp(*report.words, script=report.script, timeout=600, code=0)
    assert "001.ak47" in (place / "runs" / "caltech256.html").read_text(encoding="utf-8")


@pytest.mark.slow
def test_caltech101_in_four_precisions(vitamp: Vitamp, place: Path) -> None:
    said = []
    for command in [moved_to(one, place) for one in commands("caltech101_vit", "main_multi")]:
        run = place / "runs" / f"{len(said)}"
        # A CPU without fp16 arithmetic is very slow in it; the levels are what differs.
        dtype = [] if "fp32" in " ".join(command.words) else ["AMP.DTYPE=bf16"]
        small = ["-batch_size", 4, *SMALL_VIT, *ONE_EPOCH, *ON_CPU, *dtype, "-ngpus", 2, "-output", run]
        done = vitamp(*command.words, *small, script=command.script, timeout=400, code=0)
        said.append(re.findall(r"^  precision +(.+)$", done.out, re.MULTILINE)[0])
        assert metrics(run, "train")[-1]["update"] == 2, "27 images, 2 x 4 x 2 an update"
    assert [text.split(",")[0] for text in said] == [
        "fp32",
        "bf16 by autocast",
        "NAIVE-bf16 copy of fp32 master weights",
        "bf16 by autocast with gelu",
    ]


@pytest.mark.slow
def test_fleet(vitamp: Vitamp, place: Path) -> None:
    """PaddleViT's command lines run in tests/cli/test_document_000.py."""
    (command,) = [moved_to(one, place) for one in commands("fleet", "main_multi")]
    small = ["MODEL.NAME=resnet10t", "-image_size", 32, "AMP.DTYPE=fp16", "-ngpus", 2, "-batch_size", 4]
    # The recipe's own style, which a test of a training otherwise replaces.
    words = [*command.words, *small, *ONE_EPOCH, *ON_CPU, "LOG_STYLE=fleet"]
    done = vitamp(*words, script=command.script, env=command.env, code=0)
    assert "[Epoch 0, batch 1] loss: " in done.out
    assert sorted(path.name for path in (place / "out" / "ranks").iterdir()) == ["0.log", "1.log"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [one for page in NAMES for one in commands(page, "benchmark_amp")],
    ids=lambda command: " ".join(command.words[:4]),
)
def test_tables(vitamp: Vitamp, place: Path, command: Command) -> None:
    moved = moved_to(command, place)
    brief = "-iters 1 -threads 1 -device cpu -batch_size 2 -image_size 32"
    small = {
        "simplenet": "-width 32 -batches 2 -epochs 1 -batch_size 8 -rounds 1 -threads 1 -device cpu",
        "amp": f"{brief} -windows 1 MODEL.DEPTH=1",
        "precisions": f"{brief} -rounds 1 -modes bf16",
    }
    done = vitamp(*moved.words, *small[moved.words[0]].split(), script=moved.script, timeout=600, code=0)
    assert "ontrol: " in done.out


def test_the_first_table_of_caltech101_has_the_four_precisions_of_the_tutorial() -> None:
    first, *_ = commands("caltech101_vit", "benchmark_amp")
    asked = first.words[first.words.index("-modes") + 1]
    modes, _ = modes_to_measure(asked, Config(), torch.device("cpu"))
    assert {mode.name for mode in modes} == {"fp16", "NAIVE-fp16", "apex"}
