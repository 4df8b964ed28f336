"""DATA.EXCLUDE: forms of a line, and the remaining samples."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from datasets import check_dataset, open_dataset
from datasets.base import Samples
from datasets.exclude import Remaining, line_of, report_excluded
from tests.datasets.layouts import lay_out
from tests.datasets.opened import CPU, part, settings
from tests.program import Vitamp, save_image
from tools.check_labels.search import table_of_suspects
from tools.check_labels.searched_images import Suspect, open_images
from utils.config import Config
from utils.errors import UserError


@pytest.fixture
def names(listed: Path) -> Callable[..., list[list[str]]]:
    """Names of the training and validation images that remain after excluding these lines."""

    def opened(lines: str, encoding: str = "utf-8", path: str = str(listed)) -> list[list[str]]:
        (listed / "exclude.txt").write_bytes(lines.encode(encoding))
        data = settings(DATA_PATH=path, EXCLUDE=str(listed / "exclude.txt"))
        parts = [open_dataset(data, train, 3, 0, CPU).single_images() for train in (True, False)]
        report_excluded(data, parts)
        return [[Path(part.name(i)).name for i in range(len(part))] for part in parts if part is not None]

    return opened


@pytest.mark.parametrize(
    "line",
    [
        "train/4.png",
        "  ./train/4.png  ",
        "train/4.png  # truncated",
        "train/4.png\t# twice # marked",
        "train/4.png\r",
        "{root}/train/4.png # with spaces",
    ],
)
def test_exclude_accepts_every_form_of_a_line(names, listed: Path, line: str) -> None:
    train, val = names("# a remark\n\n" + line.format(root=listed) + "\nval/0.png")
    assert train == [f"{i}.png" for i in range(12) if i != 4]
    assert val == [f"{i}.png" for i in range(1, 7)]


def test_a_list_may_be_anywhere_with_paths_relative_to_it(listed: Path, tmp_path: Path) -> None:
    for place, lines in ((listed / "train", "4.png\ntrain/5.png"), (tmp_path / "lists/mine", "../../{}/train/4.png")):
        place.mkdir(parents=True, exist_ok=True)
        (place / "out.txt").write_text(lines.format(listed.relative_to(tmp_path)))
        data = settings(DATA_PATH=str(listed), EXCLUDE=str(place / "out.txt"))
        train = open_dataset(data, True, 3, 0, CPU).single_images()
        assert train is not None
        left = {f"{number}.png" for number in range(12)} - {Path(train.name(i)).name for i in range(len(train))}
        assert left == ({"4.png", "5.png"} if place.name == "train" else {"4.png"})


def test_exclude_accepts_bom_and_hash_in_names(names, listed: Path) -> None:
    text = (listed / "train_list.txt").read_text()
    (listed / "train" / "c # 4.png").write_bytes((listed / "train" / "4.png").read_bytes())
    (listed / "train_list.txt").write_text(text.replace("train/4.png", "train/c # 4.png"))
    assert "c # 4.png" not in names("train/c # 4.png  # its reason", encoding="utf-8-sig")[0]
    assert "c # 4.png" not in names("train/c # 4.png")[0]
    assert len(names("train/c")[0]) == 12


@pytest.mark.parametrize("relative", [False, True])
@pytest.mark.parametrize("name", ["./images/train/0.png", "images/train/0.png", "#memes/0.png"])
def test_written_lines_exclude_a_missing_image(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, relative: bool
) -> None:
    """A relative DATA_PATH is also the name of a folder in it."""
    monkeypatch.chdir(tmp_path)
    root, images = Path("images") if relative else tmp_path / "images", [("0.png", "a"), ("1.png", "a")]
    data, table = settings(**lay_out("csv", root, {"train": images, "val": images})), root / "train.csv"
    table.write_text(table.read_text().replace("images/train/0.png", name))
    (root / "images/train/0.png").unlink()
    (tmp_path / "exclude.txt").write_text(line_of(f"{root}/{name}", "https://me:secret@a/", data) + "\n")
    assert "secret" not in (tmp_path / "exclude.txt").read_text()
    data = data.changed(EXCLUDE=str(tmp_path / "exclude.txt"))
    found = part(data)
    assert [found.name(0), len(found)] == [f"{root}/images/train/1.png", 1]
    rows = table_of_suspects(open_images(Config(DATA=data), "train"), [Suspect(0, "a", "a", 1, 0, 0)], "keep")
    (tmp_path / "list.csv").write_text(rows)
    found = part(data.changed(RELABEL=str(tmp_path / "list.csv")))
    assert vars(found)["unmatched"] == {}


def test_exclude_matches_absolute_lines_with_a_relative_data_path(
    names, listed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(listed.parent)
    for line in (f"{listed}/train/4.png", f"{listed.name}/train/4.png", "train/4.png"):
        assert "4.png" not in names(line, path=listed.name)[0], line


def test_exclude_keeps_the_order_of_the_source() -> None:
    class Backwards(Samples):
        labels = np.arange(6)

        def read(self, index: int) -> bytes:
            return bytes([index])

        def name(self, index: int) -> str:
            return str(index)

        def shuffled(self, generator: np.random.Generator) -> np.ndarray:
            return np.arange(6)[::-1]

    left = Remaining(Backwards(), np.array([0, 2, 3, 5]), [1, 4])
    order = left.shuffled(np.random.default_rng(0))
    assert [left.read(int(i)) for i in order] == [b"\5", b"\3", b"\2", b"\0"]
    assert left.labels.tolist() == [0, 2, 3, 5]


def test_exclude_lines_without_a_match_are_logged(names, said: pytest.LogCaptureFixture) -> None:
    names("# a remark\ntrain/4.png  # good\nval/1.png\ntrain/5.png\n")
    (line,) = said.messages
    assert line.endswith("exclude.txt leaves out: 2 training, 1 validation images.")
    names("train/4.png\ntrian/3.png\n# a remark\nval/99.png\n")
    assert "2 of its lines match no image" in said.text
    assert "line 2, trian/3.png" in said.text
    assert "line 4, val/99.png" in said.text
    assert "A line is a path below DATA_PATH, as train/" in said.text


def test_missing_exclude_file_is_refused_before_the_run(listed: Path) -> None:
    with pytest.raises(UserError, match=r"DATA\.EXCLUDE: the file .*none\.txt does not exist.*check_data\.py"):
        check_dataset(settings(DATA_PATH=str(listed), EXCLUDE=str(listed / "none.txt")), 3)
    with pytest.raises(UserError, match="cannot be read"):
        check_dataset(settings(DATA_PATH=str(listed), EXCLUDE=str(listed)), 3)
    (listed / "binary").write_bytes(b"\xff\xfe\x00\x81")
    with pytest.raises(UserError, match="cannot be read"):
        check_dataset(settings(DATA_PATH=str(listed), EXCLUDE=str(listed / "binary")), 3)


def test_exclude_of_all_images_is_refused(names) -> None:
    with pytest.raises(UserError, match="all 7 images of a split"):
        names("\n".join(f"val/{i}.png" for i in range(7)))


def test_names_with_line_breaks_are_one_line_of_log_and_lists(tmp_path: Path, vitamp: Vitamp, tiny: Path) -> None:
    data, run = tmp_path / "data", tmp_path / "run"
    for number in range(12):
        save_image(data / ("val" if number < 4 else "train") / "ab"[number % 2] / f"{number}.jpg", number)
    save_image(data / "train/a/y\nval.jpg", 99)
    (data / "train/a/x\nDone: forged\r\x85.jpg").write_bytes(b"no image")
    (data / "train/a/z.a\nforged").touch()
    words = ("-cfg", tiny, "-dataset", "imagefolder", "-data_path", data, "-num_classes", 2, "DATA.IMAGE_CHANNELS=3")
    words = (*words, "-batch_size", 2, "TRAIN.MAX_UPDATES=5", "DATA.DROP_LAST=false")
    first = vitamp(*words, "-output", run, "DATA.MAX_BAD=1", code=0)
    assert "a/x\\nDone: forged\\r\\x85.jpg cannot be read: not an image in a known format" in first.err
    assert "skipped .a\\nforged 1 (z.a\\nforged)" in first.err
    assert "\nDone: forged" not in first.text
    assert "\nforged" not in first.text
    listed = (run / "broken.txt").read_text()
    assert listed == "train/a/x\\nDone: forged\\r\\x85.jpg  # not an image in a known format\n"
    again = vitamp(*words, "-output", tmp_path / "again", f"DATA.EXCLUDE={run / 'broken.txt'}", code=0)
    assert "Data: 9 training, 4 validation images" in again.out
    assert "cannot be read" not in again.err
    assert "match no image" not in again.err
    relabelled = settings(DATASET="imagefolder", DATA_PATH=str(data), EXCLUDE=str(run / "broken.txt"))
    for name in ("train/a/y\\nval.jpg", '"train/a/y\nval.jpg"'):
        (tmp_path / "list.csv").write_text(f"path,given,proposed,decision\n{name},a,b,drop\n")
        assert len(part(relabelled.changed(RELABEL=str(tmp_path / "list.csv")))) == 8
