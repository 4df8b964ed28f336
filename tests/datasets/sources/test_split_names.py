"""Names of splits, which are the same for every kind of data set, and the split test."""

from pathlib import Path

import pytest

from datasets import check_dataset, comes_unsplit, has_test, open_dataset
from tests.datasets.layouts import lay_out
from tests.datasets.opened import CPU, settings
from tests.datasets.shards.parquet_files import write as write_parquet
from tests.datasets.sources.published import image
from utils.config.data import DataConfig
from utils.errors import UserError

IMAGES = {"train": 6, "val": 3, "valid": 3, "validation": 3, "dev": 3, "test": 4}
FOLDERS = ("imagefolder", "imagenet2012", "lists", "csv", "shards", "shards_by_name", "parquet")


def make(kind: str, root: Path, *splits: str) -> dict[str, str]:
    """A data set with these splits, in which each split has its own number of images; its settings."""
    if kind == "parquet":
        for split in splits:
            write_parquet(root / f"{split}-00000-of-00001.parquet", range(IMAGES[split]))
        return {"DATASET": f"hf:{root}"}
    rows = {split: [(f"{split}{k}.png", k % 3) for k in range(IMAGES[split])] for split in splits}
    given = lay_out("shards" if kind == "shards_by_name" else kind, root, rows)
    if kind == "shards_by_name":
        for split in splits:
            (root / split / "0.tar").rename(root / f"cats-{split}-0.tar")
    return given


def count(data: DataConfig, train: bool = False) -> int:
    check_dataset(data, 3, train)
    return len(open_dataset(data, train, 3, 0, CPU))


@pytest.mark.parametrize("kind", FOLDERS)
@pytest.mark.parametrize("name", ["val", "valid", "validation", "dev"])
def test_each_name_of_a_validation_split_comes_before_test(
    kind: str, name: str, tmp_path: Path, said: pytest.LogCaptureFixture
) -> None:
    given = make(kind, tmp_path / "a", "train", name, "test")
    assert [count(settings(**given, PART=part)) for part in ("train", "val", "test", "all")] == [6, 3, 4, 13]
    assert count(settings(**given), train=True) == 6
    assert "used for validation" not in said.text
    with pytest.raises(UserError, match=r"DATA.PART \(-part\) test: .* has no test split; -part val evaluates"):
        count(settings(**make(kind, tmp_path / "b", "train", name), PART="test"))


@pytest.mark.parametrize("kind", FOLDERS)
def test_test_validates_only_where_nothing_else_does_and_this_is_logged(
    kind: str, tmp_path: Path, said: pytest.LogCaptureFixture
) -> None:
    given = make(kind, tmp_path / "a", "train", "test")
    # A copy of parquet files has each image once, so its test split is called val.
    parts = ("val", "all") if kind == "parquet" else ("val", "test", "all")
    assert [count(settings(**given, PART=part)) for part in parts] == [4, 4, 10][-len(parts) :]
    assert said.text.count(f"{tmp_path / 'a'}: the split test is used for validation, because no other split") == 1
    assert "DATA.KEEP_TEST=true keeps it for the end, and validates on a part of train." in said.text


@pytest.mark.parametrize("kind", FOLDERS)
def test_a_test_split_that_is_kept_is_read_only_when_it_is_asked_for(
    kind: str, tmp_path: Path, said: pytest.LogCaptureFixture
) -> None:
    given = {**make(kind, tmp_path / "a", "train", "test"), "KEEP_TEST": True}
    counts = {part: count(settings(**given, PART=part)) for part in ("train", "val", "test", "all")}
    assert counts == {"train": 3, "val": 3, "test": 4, "all": 6}, "each of 3 classes gives one"
    assert count(settings(**given), train=True) == 3
    folds = [count(settings(**given, FOLD=f"{number}/2")) for number in (1, 2)]
    assert folds == [3, 3]
    assert comes_unsplit(settings(**given))
    assert has_test(settings(**given))
    assert "used for validation" not in said.text
    # Where a split validates, it still does.
    own = {**make(kind, tmp_path / "b", "train", "val", "test"), "KEEP_TEST": True}
    assert [count(settings(**own, PART=part)) for part in ("train", "val", "test", "all")] == [6, 3, 4, 13]
    with pytest.raises(UserError, match=r"comes with its own validation split\. Leave DATA\.FOLD out, or use"):
        count(settings(**own, FOLD="1/2"))
    with pytest.raises(UserError, match=r"or make folds of train by DATA\.KEEP_TEST=true, or use"):
        count(settings(**{**given, "KEEP_TEST": False}, FOLD="1/2"))


@pytest.mark.parametrize("kind", ["imagefolder", "csv", "shards"])
def test_all_is_every_image_of_data_without_splits(kind: str, tmp_path: Path, said: pytest.LogCaptureFixture) -> None:
    given = make(kind, tmp_path / "a", "train")
    place = {"imagefolder": "train", "csv": "train.csv", "shards": "train"}[kind]
    given["DATA_PATH"] = f"{tmp_path}/a/{place}"
    counts = {part: count(settings(**given, PART=part, VAL_FRACTION=0.4)) for part in ("train", "val", "all")}
    assert counts == {"train": 3, "val": 3, "all": 6}
    asked, data = len(said.text), settings(**given, PART="all")
    dataset = open_dataset(data, False, 3, 0, CPU)
    names = [dataset.single_images().name(index) for index in range(6)]  # type: ignore[union-attr]
    assert len({*names}) == 6
    assert sorted(dataset.__getitems__([(0, index) for index in range(6)]).labels.tolist()) == [0, 0, 1, 1, 2, 2]
    assert "validate" not in said.text[asked:]
    with pytest.raises(UserError, match="has no test split"):
        count(settings(**given, PART="test"))


def test_small_sets_have_the_same_parts() -> None:
    digits = settings(DATASET="digits", IMAGE_CHANNELS=1)
    made = settings(DATASET="synthetic", SYNTHETIC_TRAIN=20, SYNTHETIC_VAL=8)
    for data, expected in ((digits, [1437, 360, 1797]), (made, [20, 8, 28])):
        found = [data.changed(PART=part) for part in ("train", "val", "all")]
        assert [len(open_dataset(one, False, 10, 0, CPU)) for one in found] == expected
        with pytest.raises(UserError, match="has no test split"):
            open_dataset(data.changed(PART="test"), False, 10, 0, CPU)


@pytest.mark.parametrize("kind", ["imagefolder", "csv", "shards"])
def test_each_class_of_two_images_has_one_in_validation(kind: str, tmp_path: Path) -> None:
    rows = [(f"{label}-{k}.png", label) for label in range(5) for k in range(1 if label == 4 else 5)]
    data = settings(**lay_out(kind, tmp_path / "set", {"": rows}))
    check_dataset(data, 5)
    assert open_dataset(data, False, 5, 0, CPU).sample_labels().tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("kind", ["imagefolder", "parquet"])
def test_hidden_folders_are_skipped(kind: str, tmp_path: Path, said: pytest.LogCaptureFixture) -> None:
    given = make(kind, tmp_path / "a", "train", "val")
    if kind == "parquet":
        write_parquet(tmp_path / "a" / ".cache" / "train-0.parquet", range(5))
        assert count(settings(**given), train=True) == 6
        return
    image(tmp_path / "a" / "train" / "0" / ".ipynb_checkpoints" / "0-checkpoint.png")
    image(tmp_path / "a" / "train" / "0" / "._0.png")
    assert count(settings(**given), train=True) == 6
    line = "skipped hidden files 1 (._0.png), hidden folders 1 (.ipynb_checkpoints)"
    assert f"{tmp_path / 'a' / 'train'}: {line}" in said.text
