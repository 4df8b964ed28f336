"""Published data sets on small trees in their layouts: images and labels equal torchvision's."""

import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from datasets import check_dataset, open_dataset
from datasets.images import Images
from tests.datasets.opened import CPU, settings
from tests.datasets.sources.published import FOLDERS, MAKERS, cifar10, cifar100, python_two, torchvisions
from tests.program import Calls, Vitamp
from tests.refused import refusal
from utils.config.data import DataConfig
from utils.errors import UserError


def opened(data: DataConfig, train: bool = True) -> Any:
    return open_dataset(data, train, 257, 0, CPU)


def listed(dataset: Images, root: Path) -> list[tuple[str, int]]:
    """(path, label) of each sample in its order."""
    samples = dataset.samples
    return [(os.path.relpath(samples.name(k), root), int(samples.labels[k])) for k in range(len(samples))]


@pytest.mark.parametrize(
    ("name", "classes", "dropped", "images"),
    [
        ("caltech101", ["Faces", "accordion", "wild_cat"], "BACKGROUND_Google", 20),
        ("caltech256", ["001.ak47", "002.american-flag"], "257.clutter", 12),
    ],
)
def test_caltech_is_split_without_its_clutter(
    tmp_path: Path, name: str, classes: list[str], dropped: str, images: int
) -> None:
    MAKERS[name](tmp_path)
    data = settings(DATASET=name, DATA_PATH=str(tmp_path), VAL_FRACTION=0.3)
    check_dataset(data, 257)
    parts = [opened(data, train) for train in (True, False)]
    assert parts[0].classes == parts[1].classes == classes
    train, validation = (listed(part, tmp_path) for part in parts)
    assert len(validation) == -(-images * 3 // 10)
    assert not set(train) & set(validation)
    every = sorted(train + validation)
    inner = tmp_path / name / f"{name.removeprefix('caltech')}_ObjectCategories"
    assert [tmp_path / path for path, _ in every] == [p for p in sorted(inner.rglob("*.jpg")) if dropped not in str(p)]
    assert all(Path(path).parent.name == classes[label] for path, label in every)
    assert {label for _, label in validation} == set(range(len(classes)))
    other = listed(opened(settings(DATASET=name, DATA_PATH=str(tmp_path), VAL_FRACTION=0.3, SPLIT_SEED=1)), tmp_path)
    assert other != train
    assert listed(opened(data), tmp_path) == train


@pytest.mark.parametrize("name", ["cifar10", "cifar100"])
@pytest.mark.parametrize("train", [True, False])
def test_cifar_equals_torchvisions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, train: bool) -> None:
    MAKERS[name](tmp_path)
    data = settings(DATASET=name, DATA_PATH=str(tmp_path), IMAGE_SIZE=32, CROP="none", FLIP=0.0)
    check_dataset(data, 257)
    theirs, dataset = torchvisions(monkeypatch, name, tmp_path, train), opened(data, train)
    batch = dataset.__getitems__([(1, index) for index in range(len(dataset))])
    assert np.array_equal(batch.images.permute(0, 2, 3, 1).numpy(), theirs.data)
    assert (batch.labels.tolist(), dataset.classes) == (theirs.targets, theirs.classes)


@pytest.mark.parametrize("size", [32, 40])
def test_cifar_read_singly_equals_cifar_in_memory(tmp_path: Path, size: int) -> None:
    """With a crop of the whole image and no other transform, both ways give the same pixels."""
    cifar10(tmp_path)
    data = settings(DATASET="cifar10", DATA_PATH=str(tmp_path), IMAGE_SIZE=size, FLIP=0.0)
    all_of_it = data.changed(CROP_SCALE=(1.0, 1.0), CROP_RATIO=(1.0, 1.0))
    keys = [(1, index) for index in range(20)]
    one_by_one, in_memory = opened(all_of_it), opened(data.changed(CROP="none"))
    assert (one_by_one.in_memory, in_memory.in_memory) == (False, True)
    got, expected = one_by_one.__getitems__(keys), in_memory.__getitems__(keys)
    assert torch.equal(got.labels, expected.labels)
    assert torch.equal(got.images, expected.images)


@pytest.mark.parametrize("name", sorted(MAKERS))
def test_data_path_may_be_the_data_sets_own_folder(tmp_path: Path, name: str) -> None:
    MAKERS[name](tmp_path)
    outer, inner = (settings(DATASET=name, DATA_PATH=str(tmp_path / sub)) for sub in ("", FOLDERS[name]))
    check_dataset(inner, 257)
    assert len(opened(inner)) == len(opened(outer)) > 0


@pytest.mark.parametrize("name", sorted(MAKERS))
def test_missing_published_data_set_error_shows_the_layout(tmp_path: Path, name: str) -> None:
    said = refusal(check_dataset, settings(DATASET=name, DATA_PATH=str(tmp_path)), 257)
    assert f"there is no {name} in {tmp_path}" in said
    assert f"Expected layout:\n  {tmp_path}/{FOLDERS[name]}/" in said
    assert "DATA.DOWNLOAD=true fetches it (" in said
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("name", "lost", "said"),
    [
        ("cifar10", "data_batch_4", "there is no data_batch_4"),
        ("cifar100", "meta", "there is no meta"),
        ("caltech101", "101_ObjectCategories", "there is no 101_ObjectCategories"),
    ],
)
def test_incomplete_published_data_set_is_refused(tmp_path: Path, name: str, lost: str, said: str) -> None:
    MAKERS[name](tmp_path)
    path = tmp_path / FOLDERS[name] / lost
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    refused = refusal(check_dataset, settings(DATASET=name, DATA_PATH=str(tmp_path), DOWNLOAD=True), 257)
    assert f"{tmp_path / FOLDERS[name]} is incomplete or damaged: {said}" in refused
    assert "Remove the folder, and DATA.DOWNLOAD=true fetches it again" in refused


def test_more_published_classes_than_num_classes_are_refused(tmp_path: Path) -> None:
    for name, classes in (("cifar10", 10), ("caltech256", 2)):
        MAKERS[name](tmp_path)
        data = settings(DATASET=name, DATA_PATH=str(tmp_path))
        with pytest.raises(UserError, match=f"has {classes} classes, .* -num_classes {classes}"):
            check_dataset(data, classes - 1)
        check_dataset(data, classes)


@pytest.mark.parametrize("damage", ["cut", "shape", "type", "label", "no labels", "text"])
def test_damaged_cifar_file_is_refused(tmp_path: Path, damage: str) -> None:
    cifar100(tmp_path)
    file = tmp_path / "cifar-100-python" / "test"
    pixels, labels = np.zeros((2, 3072), np.uint8), [0, 99]
    damaged = {
        "cut": file.read_bytes()[:9000],
        "shape": python_two({"data": pixels[:, 1:], "fine_labels": labels}),
        "type": python_two({"data": pixels.astype(np.int16), "fine_labels": labels}),
        "label": python_two({"data": pixels, "fine_labels": [0, 100]}),
        "no labels": python_two({"data": pixels}),
        "text": b"<html>not found</html>",
    }
    file.write_bytes(damaged[damage])
    with pytest.raises(
        UserError,
        match=r"cifar-100-python is incomplete or damaged: test (cannot be read|does not hold|has labels beyond)",
    ):
        check_dataset(settings(DATASET="cifar100", DATA_PATH=str(tmp_path)), 100)


@pytest.mark.parametrize("name", ["data_batch_2", "test_batch", "batches.meta"])
@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_malicious_cifar_file_is_refused(tmp_path: Path, name: str, protocol: int) -> None:
    cifar10(tmp_path)
    trace = tmp_path / "was here"
    harmful = {"data": Calls(os.system, f"touch '{trace}'"), "labels": [0], "label_names": ["a"]}
    (tmp_path / "cifar-10-batches-py" / name).write_bytes(pickle.dumps(harmful, protocol))
    with pytest.raises(UserError, match=r"it calls \w+\.system\. No CIFAR file of its publisher does this"):
        check_dataset(settings(DATASET="cifar10", DATA_PATH=str(tmp_path)), 10)
    assert not trace.exists()


@pytest.mark.parametrize("protocol", ["Python 2", 2, 4, 5])
def test_cifar_files_that_numpy_wrote_again_are_read(tmp_path: Path, protocol: int | str) -> None:
    cifar10(tmp_path)
    data = settings(DATASET="cifar10", DATA_PATH=str(tmp_path), IMAGE_SIZE=32, CROP="none")
    before = opened(data)
    for file in (tmp_path / "cifar-10-batches-py").iterdir():
        table = pickle.loads(file.read_bytes(), encoding="bytes")  # noqa: S301 - made above
        if b"labels" in table:
            table[b"labels"], table[b"filenames"] = list(np.array(table[b"labels"])), np.array(table[b"filenames"])
        file.write_bytes(pickle.dumps(table, protocol) if isinstance(protocol, int) else python_two(table))
    after = opened(data)
    assert after.classes == before.classes
    for one, other in zip(*(dataset.__getitems__([(1, 0), (1, 19)]) for dataset in (before, after)), strict=True):
        assert one.equal(other)


def test_caltech_is_found_in_any_case_below_its_parent(tmp_path: Path, vitamp: Vitamp) -> None:
    MAKERS["caltech256"](tmp_path)
    (tmp_path / "caltech256" / "256_ObjectCategories").rename(tmp_path / "caltech256" / "256_objectcategories")
    (tmp_path / "caltech256").rename(tmp_path / "Caltech256")
    check_dataset(settings(DATASET="caltech256", DATA_PATH=str(tmp_path)), 2)
    done = vitamp("-data_path", tmp_path, code=2)
    assert f"has one class, Caltech256, so there is nothing to learn: try -data_path {tmp_path}/Caltech256/" in done.err


RECIPE = """\
DATA: {DATASET: cifar10, IMAGE_SIZE: 32, BATCH_SIZE: 8, CROP: pad, NUM_WORKERS: 1}
MODEL: {NAME: tiny, NUM_CLASSES: 10, PATCH_SIZE: 8, EMBED_DIM: 16, DEPTH: 1, NUM_HEADS: 2}
TRAIN: {NUM_EPOCHS: 1, WARMUP_EPOCHS: 0, BASE_LR: 1e-3}
REPORT_FREQ: 1
THREADS: 1
DEVICE: CPU
"""


def test_training_on_cifar(tmp_path: Path, vitamp: Vitamp) -> None:
    cifar10(tmp_path, images=10)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(RECIPE)
    common = ("-cfg", recipe, "-data_path", tmp_path)
    for name, changes in (("memory", ()), ("files", ("TRAIN.RAND_AUGMENT=true",)), ("crops", ("DATA.CROP=random",))):
        done = vitamp(*common, "-output", tmp_path / name, *changes, code=0)
        assert "Step[0006/0006]" in done.out
