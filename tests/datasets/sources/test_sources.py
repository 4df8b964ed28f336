import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from datasets import check_dataset, open_dataset
from datasets.sources.digits import read_digits
from datasets.sources.split import split
from tests.datasets.opened import CPU, settings
from utils.errors import UserError


def keys(*indices: int, epoch: int = 0) -> list[tuple[int, int]]:
    return [(epoch, index) for index in indices]


def test_digits_equal_scikit_learns() -> None:
    from sklearn.datasets import load_digits

    pixels, labels = read_digits()
    images, target = load_digits(return_X_y=True)
    assert pixels.shape == (1797, 8, 8)
    assert np.array_equal(np.rint(pixels / (255 / 16)).reshape(-1, 64), images)
    assert np.array_equal(labels, target)
    assert pixels.max() == 255


def test_digits_split_is_always_the_same() -> None:
    train, validation = split(read_digits()[1], 0.2, 0, "digits")
    assert (len(train), len(validation), validation.sum()) == (1437, 360, 314_610)


def test_digits_without_scikit_learn_say_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    read_digits.cache_clear()
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(UserError, match=r"is missing\. Run: pip install --force-reinstall scikit-learn"):
        check_dataset(settings(DATASET="digits"), 10)


@pytest.mark.parametrize(("size", "channels"), [(8, 1), (8, 3), (32, 3)])
def test_digits_are_resized_and_get_the_wanted_channels(size: int, channels: int) -> None:
    data = settings(DATASET="digits", IMAGE_SIZE=size, IMAGE_CHANNELS=channels)
    batch = open_dataset(data, False, 10, 0, CPU).__getitems__(keys(3, -1, 0))
    assert batch.images.shape == (3, channels, size, size)
    assert batch.images[0].any()
    assert not batch.images[1].any()
    assert (batch.images == batch.images[:, :1]).all()
    assert batch.images.is_contiguous()
    assert batch.labels[1] == 0
    assert batch.indices.tolist() == [3, -1, 0]


def test_affine_prob_leaves_other_samples_unchanged() -> None:
    plain = {"DATASET": "digits", "IMAGE_CHANNELS": 1}
    still = open_dataset(settings(**plain), True, 10, 0, CPU).__getitems__(keys(*range(1000))).images
    half = settings(**plain, SHIFT=0.3, ROTATE=20, AFFINE_PROB=0.4)
    moved = open_dataset(half, True, 10, 0, CPU).__getitems__(keys(*range(1000))).images
    share = (moved != still).flatten(1).any(1).float().mean()
    assert 0.33 < share < 0.47


def test_synthetic_is_reproducible_and_repeats_its_pool() -> None:
    data = settings(DATASET="synthetic", SYNTHETIC_TRAIN=500, SYNTHETIC_VAL=70)
    train, validation = (open_dataset(data, part, 7, 1, CPU) for part in (True, False))
    assert (len(train), len(validation)) == (500, 70)
    batch = train.__getitems__(keys(5, 499, 5))
    assert batch.images.dtype == torch.uint8
    assert torch.equal(batch.images[0], batch.images[2])
    assert not torch.equal(batch.images[0], batch.images[1])
    assert torch.equal(batch.images[0], validation.__getitems__(keys(5, epoch=3)).images[0])
    everything = train.__getitems__(keys(*range(500)))
    assert set(everything.labels.tolist()) == set(range(7))


@pytest.mark.parametrize("name", ["imagefolder", "imagenet2012"])
def test_class_folders(class_tree: Path, name: str) -> None:
    data = settings(DATASET=name, DATA_PATH=str(class_tree))
    check_dataset(data, 3)
    for train in (True, False):
        dataset = open_dataset(data, train, 3, 0, CPU)
        assert dataset.classes == ["ant", "bee", "cat"]
        batch = dataset.__getitems__(keys(*range(6)))
        assert batch.labels.tolist() == [0, 1, 1, 2, 2, 2]
        assert batch.images.float().mean((2, 3)).argmax(1).tolist() == batch.labels.tolist()


def test_class_folders_may_be_nested_and_have_other_files(class_tree: Path) -> None:
    (class_tree / "train" / "ant" / "deep" / "er").mkdir(parents=True)
    shutil.copy(class_tree / "train" / "cat" / "0.png", class_tree / "train" / "ant" / "deep" / "er" / "x.PNG")
    (class_tree / "train" / "ant" / "notes.txt").write_text("not an image")
    (class_tree / "train" / ".cache").mkdir()
    dataset = open_dataset(settings(DATASET="imagefolder", DATA_PATH=str(class_tree)), True, 3, 0, CPU)
    assert dataset.classes == ["ant", "bee", "cat"]
    assert len(dataset) == 7
    assert dataset.__getitems__(keys(1)).images.float().mean((2, 3)).argmax(1).item() == 2


def test_validation_uses_the_labels_of_training(class_tree: Path) -> None:
    shutil.rmtree(class_tree / "val" / "ant")
    dataset = open_dataset(settings(DATASET="imagefolder", DATA_PATH=str(class_tree)), False, 3, 0, CPU)
    assert dataset.__getitems__(keys(0)).labels.item() == 1


def test_validation_alone_needs_no_training_folder(class_tree: Path) -> None:
    shutil.rmtree(class_tree / "train")
    data = settings(DATASET="imagefolder", DATA_PATH=str(class_tree))
    check_dataset(data, 3, train=False)
    assert open_dataset(data, False, 3, 0, CPU).classes == ["ant", "bee", "cat"]
    with pytest.raises(UserError, match="train"):
        check_dataset(data, 3)


def test_list_lines_may_have_spaces_tabs_and_windows_line_ends(listed: Path) -> None:
    shutil.copy(listed / "val" / "0.png", listed / "val" / "a b.png")
    (listed / "val_list.txt").write_bytes(b"\xef\xbb\xbfval/a b.png 2\r\n\r\nval/1.png\t1\r\n")
    dataset = open_dataset(settings(DATA_PATH=str(listed)), False, 3, 0, CPU)
    assert dataset.__getitems__(keys(0, 1)).labels.tolist() == [2, 1]


@pytest.mark.parametrize("name", ["digits", "synthetic", "imagefolder"])
def test_unused_path_is_warned_of_with_a_way_to_use_it(
    class_tree: Path, said: pytest.LogCaptureFixture, name: str
) -> None:
    check_dataset(settings(DATASET=name, DATA_PATH=str(class_tree)), 10)
    warned = f"{class_tree} is not used" in said.text and "-dataset imagefolder" in said.text
    assert warned == (name != "imagefolder")


def test_unused_outputs_are_logged(listed: Path, said: pytest.LogCaptureFixture) -> None:
    check_dataset(settings(DATA_PATH=str(listed)), 1000)
    assert "3 classes; 997 of the model's outputs stay unused (MODEL.NUM_CLASSES); " in said.text
    assert "MODEL.NUM_CLASSES=auto takes the number of classes" in said.text
