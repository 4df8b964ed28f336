"""Warnings at the start of a training: before the banner, each once, and never lost."""

from pathlib import Path

from tests.program import Vitamp, save_image

MORE = """
import logging

from vitamp import loss

for number in range(7):
    logging.getLogger("vitamp").warning("look at %d", number)


@loss
def mine(outputs, labels):
    return outputs.sum()
"""


def test_five_warnings_come_before_the_banner_and_the_log_has_all(vitamp: Vitamp, tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MORE)
    words, run = ("-cfg", tiny, "-use", tmp_path / "mine.py"), tmp_path / "run"
    looks = [f"warning: look at {number}" for number in range(7)]
    done = vitamp(*words, "-output", run, "TRAIN.NUM_EPOCHS=1", code=0)
    assert done.err.splitlines()[:5] == looks[:5]
    assert not [one for one in looks[5:] if one in done.text]
    assert "\n2 more warnings in log.txt\nvitamp " in done.out
    logged = (run / "log.txt").read_text()
    assert [logged.count(one) for one in looks] == [1] * 7
    assert logged.index(looks[6]) < logged.index(" arguments ")
    again = vitamp("-resume", run, "-use", tmp_path / "mine.py", "TRAIN.NUM_EPOCHS=2", code=0)
    assert again.err.splitlines()[:5] == looks[:5]
    assert "\n2 more warnings in log.txt\nvitamp " in again.out

    refused = vitamp(*words, "-num_classes", 7, code=2).err.splitlines()
    assert refused[:7] == looks, "a run without a log.txt shows all"
    assert [line.split(":")[0] for line in refused[7:]] == ["error"]
    assert vitamp(*words, "-dry_run", code=0).err.splitlines()[:7] == looks


def test_warnings_of_the_data_come_once_and_before_the_banner(vitamp: Vitamp, tmp_path: Path) -> None:
    lines = ["path;target"]
    for number in range(40):
        save_image(tmp_path / f"{number}.jpg", number % 39)
        lines.append(f"{number}.jpg;{number % 2}")
    (tmp_path / "all.csv").write_text("\n".join(lines))
    words = ("-cfg", "small_images", "-data_path", tmp_path / "all.csv", "-batch_size", 8, "-image_size", 16)
    words = (*words, "TRAIN.MAX_UPDATES=1", "MODEL.DEPTH=1", "MODEL.EMBED_DIM=8", "MODEL.NUM_HEADS=1", "-device", "cpu")
    for script, more in (("main_single_gpu.py", ()), ("main_multi_gpu.py", ("-ngpus", 2))):
        run = tmp_path / script
        done = vitamp(*words, *more, "-output", run, "-seed", 1, script=script, code=0)
        assert done.err.count("columns are separated by ';'") == 1, done.text
        logged = (run / "log.txt").read_text()
        warned = [line for line in logged.partition(" arguments ")[2].splitlines() if " warning: " in line]
        assert not warned, "after the banner"


def test_a_folder_alone_names_the_recipes_for_it(vitamp: Vitamp, tmp_path: Path) -> None:
    for name in ("cat", "dog"):
        for number in range(4):
            save_image(tmp_path / "images" / name / f"{number}.png", seed=number)
    warned = "warning: Nothing chooses a model, so a ViT-B/16 learns from scratch"
    too_large = ("-batch_size", 100)  # ends before the first update
    alone = vitamp(tmp_path / "images", *too_large, code=2)
    assert warned in alone.err
    assert "-cfg finetune" in alone.err
    assert warned in vitamp(tmp_path / "images", "-num_classes", "auto", *too_large, code=2).err
    named = ("-model", "vit_tiny_patch16_224")
    assert warned not in vitamp(tmp_path / "images", *named, *too_large, code=2).err
