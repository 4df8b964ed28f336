"""Which images a model is evaluated on: -part, and other data than the run's (evaluate.py and -eval)."""

import json
import re
import shlex
import shutil
from pathlib import Path

import pytest

from tests.program import Vitamp, change_settings, metrics, run_program, save_image
from tools.checkpoint import command as checkpoint

RECIPE = """\
DATA: {{DATASET: imagefolder, DATA_PATH: {path}, IMAGE_SIZE: 8, BATCH_SIZE: 8, NUM_WORKERS: 0, EXCLUDE: {exclude}}}
MODEL: {{NAME: tiny, NUM_CLASSES: 3, PATCH_SIZE: 4, EMBED_DIM: 16, DEPTH: 1, NUM_HEADS: 2}}
TRAIN: {{NUM_EPOCHS: 1, WARMUP_EPOCHS: 0, BASE_LR: 2e-3}}
THREADS: 1
DEVICE: cpu
"""


def folders(root: Path, prefix: str, each: int, classes: str = "abc") -> Path:
    for name in classes:
        for number in range(each):
            save_image(root / name / f"{prefix}{number}.jpg", seed=ord(name) * 100 + number, size=(12, 12))
    return root


@pytest.fixture(scope="module")
def run(place: Path) -> Path:
    """A run on 30 images in class folders, without one that DATA.EXCLUDE names."""
    folders(place / "own", "own", 10)
    (place / "exclude.txt").write_text("a/own3.jpg\nb/new1.jpg\n")
    recipe = RECIPE.format(path=place / "own", exclude=place / "exclude.txt")
    (place / "icons.yaml").write_text(recipe)
    run_program("-cfg", place / "icons.yaml", "-output", place / "run", streams=place, code=0)
    return place / "run"


def evaluated(vitamp: Vitamp, run: Path, *words: object) -> str:
    """The line of evaluate.py that counts the images, after checking that it and -eval have the same metrics."""
    out = run.parent / "eval.json"
    done = vitamp(run, *words, "-json", out, "-overwrite", script="scripts/evaluate.py", code=0)
    shutil.rmtree(run.parent / "eval", ignore_errors=True)
    same = vitamp("-eval", "-resume", run, "-output", run.parent / "eval", *words, code=0)
    (line,) = metrics(run.parent / "eval", "val")
    found = json.loads(out.read_text(encoding="utf-8"))["figures"]["model"]
    assert (found["acc1"], found["nll"]) == (line["acc1"], pytest.approx(line["loss"], rel=1e-6))
    (counts,) = [one for one in done.out.splitlines() if "calibration in" in one]
    counts = counts.partition(" of 3 classes")[0]
    assert f"{counts} of 8 x 8" in same.text
    return counts + "".join(f"\n{note}" for note in done.out.splitlines() if note.startswith("DATA."))


def test_the_named_command_keeps_how_images_are_prepared(vitamp: Vitamp, run: Path, tmp_path: Path) -> None:
    def found(run: Path, *words: object) -> tuple[float, str]:
        done = vitamp(run, *words, "-json", tmp_path / "found.json", "-overwrite", script="scripts/evaluate.py", code=0)
        (nll,) = [one["nll"] for one in json.loads((tmp_path / "found.json").read_text())["figures"].values()]
        return nll, done.out.splitlines()[-2]

    nll, said = found(run, "DATA.CROP_PCT=0.5", "DATA.BACKGROUND=black", "-batch_size", 7)
    assert said.startswith("DATA.CROP_PCT=0.5 DATA.BACKGROUND=black: in this evaluation alone. ")
    _, _, *words = shlex.split(said.split("`")[1])
    vitamp(*words[:-1], tmp_path / "new", code=0)
    kept, said = found(tmp_path / "new")
    assert kept == nll
    assert "alone" not in said
    own, said = found(run, "-batch_size", 7, "DATA.BACKGROUND=white")
    assert own != nll
    assert "alone" not in said

    # The command takes the weights that were evaluated.
    averaged = tmp_path / "averaged"
    vitamp(
        "-cfg", run / "config.yaml", "-output", averaged, "TRAIN.MODEL_EMA=true", "TRAIN.MODEL_EMA_DECAY=0.5", code=0
    )
    for weights in ("model", "ema"):
        nll, said = found(averaged, "-weights", weights, "DATA.CROP_PCT=0.5")
        _, _, *words = shlex.split(said.split("`")[1])
        vitamp(*words[:-1], tmp_path / weights, code=0)
        assert found(tmp_path / weights)[0] == nll


def test_a_recipe_does_not_change_how_images_are_evaluated(vitamp: Vitamp, place: Path, run: Path) -> None:
    recipe, out = place / "icons.yaml", place / "squeezed"
    assert run.exists(), "it has written the recipe"
    prepared = ("DATA.CROP=none", "DATA.BACKGROUND=black", "DATA.EXIF_ROTATE=true")
    vitamp("-cfg", recipe, *prepared, "-output", out, code=0)
    done = vitamp("-cfg", recipe, "-eval", "-resume", out, "-output", place / "as_trained", code=0)
    assert metrics(place / "as_trained", "val")[0]["loss"] == metrics(out, "val")[-1]["loss"]
    assert "the run was trained with" not in done.text
    words = ("-eval", "-resume", out, "DATA.BACKGROUND=white", "DATA.CROP=random", "-dry_run")
    said = vitamp("-cfg", recipe, *words, code=0).text
    assert "DATA.BACKGROUND: the run was trained with black, but it is white now." in said
    assert "DATA.CROP: the run was trained with none, but it is random now." in said
    said = vitamp("-cfg", recipe, "-eval", "-resume", run, "DATA.CROP=pad", "-dry_run", code=0).text
    assert "DATA.CROP: " not in said, "of training alone"
    said = vitamp("-cfg", recipe, "-eval", "-pretrained", out, "-dry_run", code=0).text
    assert "DATA.BACKGROUND: the run was trained with black, but it is white now." in said
    assert "DATA.CROP: " not in said, "the weights say that images are squeezed"
    said = vitamp("-cfg", recipe, "-eval", "-pretrained", run, "DATA.CROP=none", "-dry_run", code=0).text
    assert "DATA.CROP: the run was trained with random, but it is none now." in said


@pytest.mark.slow
def test_all_of_other_data_is_evaluated_without_the_runs_exclusions(
    vitamp: Vitamp, run: Path, place: Path, tmp_path: Path
) -> None:
    other = folders(tmp_path / "new", "new", 5)
    found = evaluated(vitamp, run, "-data_path", other)
    why = "has other file names or labels than the training, though perhaps the same images; "
    assert f"imagefolder in {other}, all images: 15 images\n" in found
    assert f"\nDATA.PART all: imagefolder in {other} {why}it has no validation split of its own." in found
    assert f"DATA.EXCLUDE {place / 'exclude.txt'} of the run has no effect: imagefolder in {other} is other" in found
    excluded = evaluated(vitamp, run, "-data_path", other, f"DATA.EXCLUDE={place / 'exclude.txt'}")
    assert "DATA.EXCLUDE leaves out 1 of 15 images here." in excluded
    assert f"imagefolder in {other}, all images: 14 images\n" in excluded
    part = evaluated(vitamp, run, "-data_path", other, "-part", "val")
    assert part.startswith(f"imagefolder in {other}, validation split: 3 images")


def test_other_data_with_splits_is_evaluated_on_its_validation_split(vitamp: Vitamp, run: Path, tmp_path: Path) -> None:
    for name, each in (("train", 5), ("valid", 2), ("test", 3)):
        folders(tmp_path / "new" / name, name, each)
    found = evaluated(vitamp, run, "-data_path", tmp_path / "new")
    assert found.startswith(f"imagefolder in {tmp_path / 'new'}, validation split: 6 images\n")
    assert "has other file names or labels than the training, though perhaps the same images." in found
    test = evaluated(vitamp, run, "-data_path", tmp_path / "new", "-part", "test")
    assert test.startswith(f"imagefolder in {tmp_path / 'new'}, test split: 9 images")


@pytest.mark.slow
def test_parts_of_a_run_on_the_folders_train_and_test(vitamp: Vitamp, tmp_path: Path) -> None:
    """Images in train/, without a class in test/, and a hidden folder."""
    own = tmp_path / "own"
    folders(own / "train", "train", 4)
    folders(own / "test", "test", 2, "ab")
    save_image(own / "train" / ".ipynb_checkpoints" / "0.jpg", seed=1, size=(12, 12))
    (tmp_path / "icons.yaml").write_text(RECIPE.format(path=own, exclude="null"))
    done = vitamp("-cfg", tmp_path / "icons.yaml", "-output", tmp_path / "run", code=0)
    assert done.text.count("has no image for") == done.text.count("no image for 1 of its 3 classes (the first: c)") == 1
    assert "cannot be read" not in done.text
    assert "split at random" not in done.text
    assert f"{own / 'train'}: skipped hidden folders 1 (.ipynb_checkpoints)" in done.text
    whole = vitamp(tmp_path / "run", "-data_path", own / "test", script="scripts/evaluate.py")
    assert "all images: 4 images" in whole.text
    for words, times in (((), 1), (("-part", "test"), 0), (("-part", "all"), 0)):
        done = vitamp(tmp_path / "run", *words, script="scripts/evaluate.py", code=0)
        assert ("all images: 16 images" if "all" in words else "test split: 4 images") in done.text
        assert done.text.count("the split test is used for validation") == times
        assert "cannot be read" not in done.text
    # A run that keeps test for the end, and chooses among different validations, names the command. A run that does not
    # keep it would be split otherwise.
    words = "-cfg", tmp_path / "icons.yaml", "-output", tmp_path / "kept", "-epochs", 3, "DATA.KEEP_TEST=true"
    kept = vitamp(*words, "-lr", 1, "SAVE_BEST_BY=loss", code=0)
    assert "split at random" in kept.text
    assert f"`python scripts/evaluate.py {tmp_path / 'kept'} -part test`" in kept.text
    for words, counted in ((), "validation split: 3 images"), (("-part", "test"), "test split: 4 images"):
        assert counted in vitamp(tmp_path / "kept", *words, script="scripts/evaluate.py", code=0).text
    whole = vitamp(tmp_path / "kept", "-part", "all", script="scripts/evaluate.py", code=0)
    assert "all images but those of test: 12 images" in whole.text
    for split, each in (("train", 3), ("test", 2)):
        folders(tmp_path / "other" / split, f"new{split}", each)
    other = vitamp(tmp_path / "kept", "-data_path", tmp_path / "other", script="scripts/evaluate.py", code=0)
    assert "test split: 6 images" in other.text, "of other data, test chose nothing"
    refused = vitamp(tmp_path / "run", "DATA.KEEP_TEST=true", script="scripts/evaluate.py", code=2)
    assert "would now be split otherwise than in its training" in refused.text
    refused = vitamp("-resume", tmp_path / "run", "-epochs", 2, "DATA.KEEP_TEST=true", code=2)
    assert "trained with DATA.KEEP_TEST false; with true it would be validated on images" in refused.text


def test_eval_refuses_classes_with_other_labels(vitamp: Vitamp, run: Path, tmp_path: Path) -> None:
    weights = ("-cfg", run.parent / "icons.yaml", "-pretrained", run)
    resumed = ("-resume", run)
    for classes, words, code in (("ab", resumed, 0), ("xyz", resumed, 0), ("bc", resumed, 2), ("bc", weights, 2)):
        other = folders(tmp_path / classes, "new", 2, classes)
        done = vitamp("-eval", *words, "-data_path", other, f"SAVE={tmp_path / 'evals'}", code=code)
        said = f"label 0 was a in training, but is b in imagefolder in {other}. `python scripts/evaluate.py {run}"
        assert (said in done.err) == (code == 2)
        assert ("its classes had other names (now: x, y, z, ...)" in done.err) == (classes == "xyz")
    assert len([*(tmp_path / "evals").iterdir()]) == 2
    assert "4 images of 2 classes" in vitamp(run, "-data_path", other, script="scripts/evaluate.py", code=0).out


@pytest.mark.parametrize("older", [False, True])
def test_data_that_has_moved_keeps_the_split_of_the_run(
    vitamp: Vitamp, run: Path, place: Path, tmp_path: Path, older: bool
) -> None:
    shutil.copytree(place / "own", tmp_path / "moved")
    if older:  # its checkpoint has the labels and the order of the samples, not their names
        run = shutil.copytree(run, tmp_path / "run")
        (file,) = run.glob("checkpoints/*/meta.json")
        meta = json.loads(file.read_text())
        del meta["samples"]["data"]
        del meta["meta_sha256"]
        file.write_text(json.dumps(meta))
    found = evaluated(vitamp, run, "-data_path", tmp_path / "moved")
    assert found.startswith(f"imagefolder in {tmp_path / 'moved'}, validation split: 3 images\n")
    assert "is the data that the model was trained on, in another place." in found
    (tmp_path / "others.txt").write_text("a/own5.jpg\n")  # for training
    found = evaluated(vitamp, run, "-data_path", tmp_path / "moved", f"DATA.EXCLUDE={tmp_path / 'others.txt'}")
    assert found.startswith(f"imagefolder in {tmp_path / 'moved'}, validation split: 3 images\n")
    listed = (place / "exclude.txt").rename(tmp_path / "exclude.txt")
    done = vitamp(run, "-data_path", tmp_path / "moved", script="scripts/evaluate.py")
    listed.rename(place / "exclude.txt")
    assert (done.code, "For other images than the run's, give DATA.EXCLUDE=null." in done.err) == (2, True), done.text
    save_image(tmp_path / "moved" / "a" / "own2.jpg", seed=1, size=(12, 12))
    found = evaluated(vitamp, run, "-data_path", tmp_path / "moved")
    assert (
        "but other bytes in 1 of 26 compared training images. If these are other images, -part all evaluates" in found
    )
    (tmp_path / "moved" / "a" / "own3.jpg").rename(tmp_path / "moved" / "a" / "own99.jpg")
    assert "all images: 30 images" in evaluated(vitamp, run, "-data_path", tmp_path / "moved")


def test_copies_of_training_images_are_named(vitamp: Vitamp, run: Path, place: Path, tmp_path: Path) -> None:
    """In other folders, under other names; more than a few are refused for a temperature."""
    other, evaluate = folders(tmp_path / "new", "new", 30), {"script": "scripts/evaluate.py"}
    for image in other.glob("*/new?.jpg"):  # has the bytes of one of the run's
        image.unlink()
    has = "compared images have the bytes of training images ("
    words = (run, "-data_path", other)
    assert has not in vitamp(*words, **evaluate, code=0).err
    for number in (6, 7):  # of a class with one validation image
        shutil.copy(place / "own" / "b" / f"own{number}.jpg", other / "b" / f"copy{number}.jpg")
    done = vitamp(*words, "-calibrate", **evaluate)
    assert f"warning: 2 of 62 {has}" in done.err
    for image in (place / "own").glob("*/*.jpg"):
        shutil.copy(image, other / image.parent.name / f"copy{image.stem[-1]}.jpg")
    said = f"26 of 90 {has}"
    for done in (
        vitamp(*words, **evaluate, code=0),
        vitamp("-eval", "-resume", run, *words[1:], "-output", tmp_path / "eval", code=0),
    ):
        assert said in done.text
        assert "; at most 64 are new, and only these show what to expect." in done.text
    refused = vitamp(*words, "-calibrate", **evaluate, code=2).err
    assert f"-calibrate needs images that the model was not trained on: 26 of 90 {has}" in refused
    (place / "own").rename(place / "gone")
    try:
        assert has not in vitamp(*words, **evaluate, code=0).text, "nothing to compare with"
    finally:
        (place / "gone").rename(place / "own")


@pytest.mark.parametrize("groups", [(), ("DATA.GROUP=name_start",)])
def test_new_pictures_of_known_things_are_named(vitamp: Vitamp, tmp_path: Path, groups: tuple[str, ...]) -> None:
    """Where other data has the names of training images, an evaluation in groups says so, too."""
    for folder, number in (("own", 1), ("later", 2)):
        for thing in range(60):
            name = tmp_path / folder / "abc"[thing % 3] / f"thing{thing}x_{number}.png"
            save_image(name, seed=thing % 3 * 100 + number, size=(12, 12))
    recipe = RECIPE.format(path=tmp_path / "own", exclude="null")
    (tmp_path / "names.yaml").write_text(recipe)
    vitamp("-cfg", tmp_path / "names.yaml", "-output", tmp_path / "run", code=0)
    words = (tmp_path / "run", "-dataset", "imagefolder", "-data_path", tmp_path / "later", *groups)
    said = vitamp(*words, script="scripts/evaluate.py", code=0).out
    assert re.search("of 60 images share .* with a training image", said)
    assert "If they show the same things, it is the accuracy on new pictures of known things" in said


def test_copies_are_counted_with_more_outputs_than_classes(vitamp: Vitamp, tmp_path: Path) -> None:
    own = folders(tmp_path / "own", "own", 5)
    rows = [f"{image.relative_to(own)},{image.parent.name}" for image in sorted(own.glob("*/*.jpg"))]
    for name in ("own.csv", "same.csv"):
        (own / name).write_text("\n".join(["file,labels", *rows]) + "\n")
        rows = [row for row in rows if "own0" not in row]
    recipe = RECIPE.format(path=own / "own.csv", exclude="null").replace("imagefolder", "csv, MULTI_LABEL: true")
    (tmp_path / "icons.yaml").write_text(recipe.replace("CLASSES: 3", "CLASSES: 5"))
    vitamp("-cfg", tmp_path / "icons.yaml", "-output", tmp_path / "run", code=0)
    done = vitamp(tmp_path / "run", "-data_path", own / "same.csv", script="scripts/evaluate.py", code=0)
    assert "of 12 compared images have the bytes of training images" in done.err


def test_stripped_weights_recognise_the_data_of_their_run(
    vitamp: Vitamp, run: Path, place: Path, tmp_path: Path
) -> None:
    assert checkpoint.main(["strip", str(run), "-out", str(tmp_path / "w.safetensors")]) == 0
    other = folders(tmp_path / "new", "new", 5)
    for data, said in ((place / "own", "validation split: 3 images"), (other, "all images: 15 images")):
        words = ("-data_path", data, f"DATA.EXCLUDE={place / 'exclude.txt'}" if data != other else "SEED=0")
        done = vitamp(tmp_path / "w.safetensors", *words, script="scripts/evaluate.py", code=0)
        assert said in done.out
    change_settings(copied := shutil.copytree(run, tmp_path / "run"), {}, without="DATA.DATASET")
    vitamp(copied, "-dataset", "imagefolder", "-data_path", other, script="scripts/evaluate.py", code=0)


def test_part_is_for_evaluation(vitamp: Vitamp, place: Path, run: Path, tmp_path: Path) -> None:
    assert run.is_dir()
    done = vitamp("-cfg", place / "icons.yaml", "-part", "test", "-output", tmp_path / "run", code=2)
    assert "-part: DATA.PART: test needs EVAL=true: training uses val" in done.err


def test_other_tools_take_a_part_of_the_runs_data(vitamp: Vitamp, run: Path, tmp_path: Path) -> None:
    for part, images in (("val", 3), ("train", 26), ("all", 29)):
        out = tmp_path / f"{part}.csv"
        done = vitamp(run, "-part", part, "-topk", 1, "-out", out, script="scripts/predict.py", code=0)
        rows = out.read_text(encoding="utf-8").splitlines()[1:]
        assert len(rows) == images
        assert all(row.startswith(f"{run.parent / 'own'}/") for row in rows)
        page = tmp_path / f"{part}.html"
        done = vitamp(run, "-part", part, "-out", page, script="scripts/report.py", code=0)
        called = {"val": "validation images", "train": "training images", "all": "images"}[part]
        assert f"</b> on {images} {called} (95" in page.read_text(encoding="utf-8")
    exported = ("-to", "safetensors", "-out", tmp_path / "w.safetensors", "-part", "train")
    done = vitamp(run, *exported, script="scripts/export.py", code=0)
    assert "checked on 26 images of the run's training split" in done.text
    again = ("-data_path", run.parent / "own", f"DATA.EXCLUDE={run.parent / 'exclude.txt'}")
    done = vitamp(tmp_path / "w.safetensors", *again, script="scripts/evaluate.py", code=0)
    assert "has the names and labels of the data that the model was trained on." in done.text, "its place is unknown"
    for words, said in (
        ((run,), "IMAGE is missing"),
        ((run, "-part", "val", "x.jpg"), "-part val predicts the images of the run's data; leave x.jpg out"),
        ((run, "-part", "test"), "has no test split"),
    ):
        done = vitamp(*words, script="scripts/predict.py", code=2)
        assert said in done.err


def test_a_table_is_recognised_as_in_training(vitamp: Vitamp, run: Path, tmp_path: Path) -> None:
    other = folders(tmp_path / "new", "new", 2)
    lines = [f"{path.relative_to(other)};{path.parent.name}" for path in sorted(other.glob("*/*.jpg"))]
    table = tmp_path / "new" / "labels.csv"
    table.write_text("\n".join(["Datei;Klasse", *lines]) + "\n")
    found = evaluated(vitamp, run, "-data_path", table)
    assert found.startswith(f"csv in {table}, all images: 6 images\nDATA.DATASET csv: a table.\n")
    alone = shutil.copytree(next(run.glob("checkpoints/step-*")), tmp_path / "alone")
    done = vitamp("-eval", "-resume", alone, "-data_path", table, "-output", tmp_path / "eval", code=0)
    assert "DATA.DATASET csv: a table\n" in done.text
    table.write_text("\n".join(["id;Datei;Klasse", *(f"1;{line}" for line in lines)]) + "\n")
    assert "all images: 6 images" in evaluated(vitamp, run, "-data_path", table, "-columns", "file=Datei,label=Klasse")


def test_one_image_per_class_is_evaluated(vitamp: Vitamp, run: Path, tmp_path: Path) -> None:
    other = folders(tmp_path / "new", "new", 1)
    assert "all images: 3 images" in evaluated(vitamp, run, "-data_path", other)
    words = ("-cfg", run.parent / "icons.yaml", "-data_path", other, "DATA.EXCLUDE=null", "-output", tmp_path / "out")
    done = vitamp(*words, "-eval", code=0)
    assert f"DATA.PART all: imagefolder in {other} has one image per class, so nothing can be split off" in done.text
    assert "all images: 3 images of 8 x 8" in done.text
    checked = vitamp(*words, script="scripts/check_data.py", code=0)
    assert "all images are checked as training images." in checked.err
    assert "Training split: 3 images in 3 classes" in checked.out
    timed = vitamp(*words, "-rounds", 1, script="bench/loading.py", code=0).out
    assert "rounds of 3 images" in timed
    assert "\nvalidation:\n  vitamp: " in timed
    assert "too few images for a validation split: 3 in" in vitamp(*words, "-output", tmp_path / "x", code=2).err


def test_a_split_with_images_of_the_training_is_refused(vitamp: Vitamp, run: Path, place: Path, tmp_path: Path) -> None:
    """Unless a list of the run, which applies after the split, may have changed; whatever its own augmentations are."""
    evaluate = {"script": "scripts/evaluate.py"}
    said = "would now be split otherwise than in its training, so images that it was trained on would be"
    own, recipe = folders(tmp_path / "own", "own", 10), tmp_path / "icons.yaml"
    recipe.write_text(RECIPE.format(path=own, exclude="null"))
    code = "from vitamp import augmentation\n\n\n@augmentation\ndef same(image):\n    return image\n"
    (tmp_path / "mine.py").write_text(code)
    plain = tmp_path / "plain"
    vitamp("-cfg", recipe, "-output", plain, "-use", tmp_path / "mine.py", "TRAIN.AUGMENT=same", code=0)
    fold = ("-cfg", recipe, "-eval", "-resume", plain, "-output", tmp_path / "eval", "DATA.FOLD=1/5")
    for words, how in (((plain, "DATA.SPLIT_SEED=1"), evaluate), (fold, {})):
        assert said in vitamp(*words, **how, code=2).err
    vitamp(plain, "-part", "all", "DATA.SPLIT_SEED=1", **evaluate, code=0)
    vitamp(plain, f"DATA.EXCLUDE={place / 'exclude.txt'}", **evaluate, code=0)
    save_image(own / "a" / "more.jpg", seed=1, size=(12, 12))
    assert said in vitamp(plain, **evaluate, code=2).err
    assert said in vitamp(plain, "-part", "val", script="scripts/predict.py", code=2).err
    assert said in vitamp(run, "DATA.SPLIT_SEED=1", **evaluate, code=2).err


def test_other_labels_make_another_split(vitamp: Vitamp, tmp_path: Path) -> None:
    """Each class is split by itself, so a column of corrected labels would move training images to validation."""
    own = folders(tmp_path / "own", "own", 10)
    lines = [f"{path.relative_to(tmp_path)},{path.parent.name}" for path in sorted(own.glob("*/*.jpg"))]
    rows = ["file,label,same,checked"]
    for number, line in enumerate(lines):
        label = line[-1]
        rows.append(f"{line},{label},{'abc'[number % 3]}")
    table = tmp_path / "labels.csv"
    table.write_text("\n".join(rows) + "\n")
    recipe = tmp_path / "table.yaml"
    recipe.write_text(RECIPE.format(path=table, exclude="null").replace("imagefolder", "csv"))
    vitamp("-cfg", recipe, "-output", tmp_path / "run", "-columns", "file=file,label=label", code=0)
    evaluate = (tmp_path / "run", "-columns")
    vitamp(*evaluate, "file=file,label=same", script="scripts/evaluate.py", code=0)
    done = vitamp(*evaluate, "file=file,label=checked", script="scripts/evaluate.py", code=2)
    assert "would now be split otherwise than in its training" in done.err
    assert "The files have changed, or DATA.COLUMNS, DATA.FOLD, DATA.GROUP, DATA.KEEP_TEST, " in done.err


def test_settings_without_effect_on_the_split_may_change(vitamp: Vitamp, tiny: Path, tmp_path: Path) -> None:
    """With a fold, DATA.VAL_FRACTION splits nothing; the own split of digits has neither a fraction nor a seed."""
    fold = ("DATA.FOLD=1/5", "DATA.VAL_FRACTION=0.3")
    for words, changed in (((), ("DATA.SPLIT_SEED=1", "DATA.VAL_FRACTION=0.3")), (fold[:1], fold)):
        run = tmp_path / f"run{len(words)}"
        vitamp("-cfg", tiny, "-output", run, "TRAIN.MAX_UPDATES=1", *words, code=0)
        vitamp(run, *changed, script="scripts/evaluate.py", code=0)
