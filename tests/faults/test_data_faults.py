"""Broken images and dying loading processes, as the user of a whole run meets them."""

import errno
import os
import re
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from datasets import EpochOrder
from datasets.sources import shared
from datasets.sources.imagefolder import class_files
from tests.datasets.shards.tar_files import write_set
from tests.faults.killing import ENDLESS, Run, reported
from tests.program import Result, Started, Vitamp, metrics, save_image
from tests.waiting import until
from utils.distributed.world import World

MODEL = [
    *("MODEL.DEPTH=1", "MODEL.EMBED_DIM=16", "MODEL.NUM_HEADS=2", "MODEL.PATCH_SIZE=16", "DATA.IMAGE_SIZE=32"),
    *("DATA.IMAGE_CHANNELS=3", "DATA.DATASET=imagefolder", "DATA.NUM_WORKERS=1", "DATA.BATCH_SIZE=10"),
    *("TRAIN.WARMUP_EPOCHS=0", "DATA.DROP_LAST=false"),
]
TRAINING, BROKEN = 200, {17: b"", 141: b"<html>404</html>"}


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Class folders of 200 + 10 images; one in a hundred of the training part is broken."""
    root = tmp_path_factory.mktemp("photos")
    for part, count in (("train", TRAINING), ("val", 10)):
        for number in range(count):
            save_image(root / part / "abcde"[number * 5 // count] / f"{number:03}.jpg", number + 1000 * len(part))
    for number, content in BROKEN.items():
        name_of(root, number).write_bytes(content)
    return root


def name_of(root: Path, number: int) -> Path:
    return root / "train" / "abcde"[number * 5 // TRAINING] / f"{number:03}.jpg"


@pytest.fixture
def train(vitamp: Vitamp, tiny: Path, photos: Path) -> Callable[..., Result]:
    def call(*words: object, **options: object) -> Result:
        return vitamp("-cfg", tiny, *MODEL, "-data_path", photos, *words, **options)

    return call


PAUSED = ("DATA.BATCH_SIZE=200", "TRAIN.NUM_EPOCHS=800", "-max_time", "0:00:01")


@pytest.mark.parametrize("words", [(), PAUSED], ids=["", "paused"])
def test_training_ends_well_with_one_broken_image_in_a_hundred(
    train: Callable[..., Result], photos: Path, tmp_path: Path, words: tuple[object, ...]
) -> None:
    done = train("-output", tmp_path / "run", "DATA.MAX_BAD=0.01", *words, code=0)
    assert ("Paused, to be resumed" in done.out) == bool(words)
    for number in BROKEN:
        assert done.err.count(f"{name_of(photos, number)} cannot be read: ") == 1
    assert "2 training images could not be read and were replaced." in done.err
    found = (tmp_path / "run" / "broken.txt").read_text()
    assert {line.split("  # ")[0] for line in found.splitlines()} == {
        str(name_of(photos, number).relative_to(photos)) for number in BROKEN
    }
    without = f"DATA.EXCLUDE={tmp_path / 'run' / 'broken.txt'}"
    again = train("-output", tmp_path / "again", "TRAIN.NUM_EPOCHS=1", "DATA.MAX_BAD=0", without, code=0)
    assert again.err == ""


def test_two_processes_name_what_each_of_them_met(train: Callable[..., Result], photos: Path, tmp_path: Path) -> None:
    order = [EpochOrder(TRAINING, 10, 1, rank, 2, 0, False) for rank in (0, 1)]
    met = [{int(i) for shares in one.windows(1) for share in shares for i in share.indices} for one in order]
    assert all(len(one & BROKEN.keys()) == 1 for one in met), "each of the two is to meet one"
    # Each keeps below the limit, both together do not: all end, and one of them tells.
    words = ("-output", tmp_path / "run", "-ngpus", 2, "DATA.MAX_BAD=1", "TRAIN.NUM_EPOCHS=1")
    done = train(*words, script="main_multi_gpu.py", timeout=240, code=1)
    for number in BROKEN:
        assert done.err.count(f"{name_of(photos, number)} cannot be read: ") == 1, done.err
    assert done.err.count("2 training images cannot be read, and DATA.MAX_BAD allows 1") == 1, done.err
    assert len((tmp_path / "run" / "broken.txt").read_text().splitlines()) == 2


@pytest.mark.slow
def test_run_whose_loading_processes_were_killed_resumes(
    start: Callable[..., Run], train: Callable[..., Result], photos: Path, tmp_path: Path
) -> None:
    words = ("DATA.NUM_WORKERS=2", "TRAIN.NUM_EPOCHS=12", "REPORT_FREQ=1", "VALIDATE_FREQ=100", "SAVE_FREQ=1")
    run = start(*MODEL, "-data_path", photos, *words, folder=tmp_path / "killed", ngpus=0)
    run.wait_for_updates()
    for pid in run.loaders():
        os.kill(pid, signal.SIGKILL)
    assert "was killed by SIGKILL (probably out of memory)" in run.end(60).expect(1).err
    train("-output", tmp_path / "killed", *words, "-resume", "auto", code=0)


@pytest.mark.parametrize("dataset", ["imagefolder", "shards"])
def test_ranks_of_a_machine_map_one_list_of_images(
    start: Callable[..., Run], photos: Path, tmp_path: Path, dataset: str
) -> None:
    root = photos if dataset == "imagefolder" else write_set(tmp_path / "set", [20, 20])
    words = (*MODEL, f"DATA.DATASET={dataset}", "-data_path", root, "REPORT_FREQ=1", *ENDLESS)
    (temporary := tmp_path / "temporary").mkdir()
    run = start(*words, folder=tmp_path / "run", ngpus=2, TMPDIR=str(temporary))
    run.wait_for_updates()
    processes = [*run.ranks(), *run.loaders()]
    assert len(processes) == 4
    for pid in processes:
        mapped = Path(f"/proc/{pid}/maps").read_text()
        assert len({*re.findall(rf"{temporary}/vitamp-images-\w+/arrays \(deleted\)", mapped)}) == 2
    assert not list(temporary.glob("vitamp-images-*"))
    run.kill_all()


def test_list_of_images_that_no_disk_takes_is_kept_by_each_rank(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("pathlib.Path.write_bytes", full)
    monkeypatch.setattr(shared, "all_gather", lambda items, _: items)
    monkeypatch.setattr(shared, "on_every_rank", lambda _, work: work())
    assert len(shared.listed_once(lambda: class_files(photos / "train", [*"abcde"]), World(0, 2, 0, 2))) == TRAINING
    assert "Each process keeps a list of images of its own" in said.text
    assert not list(tmp_path.iterdir())


def test_a_broken_validation_image_costs_no_training(
    train: Callable[..., Result], photos: Path, tmp_path: Path
) -> None:
    train("-output", tmp_path / "healthy", "TRAIN.NUM_EPOCHS=1", "TRAIN.ACCUM_ITER=2", code=0)
    data, run = tmp_path / "data", tmp_path / "run"
    shutil.copytree(photos, data)
    victim = data / "val" / "c" / "005.jpg"
    whole = victim.read_bytes()
    victim.write_bytes(b"")
    words = ("-data_path", data, "-output", run, "TRAIN.NUM_EPOCHS=1", "-ngpus", 2, "-resume", "auto")
    done = train(*words, script="main_multi_gpu.py", code=1)
    assert done.err.count(f"1 validation image cannot be read: {victim} (the file is empty)") == 1
    assert "The training so far is saved" in done.err
    victim.write_bytes(whole)
    train(*words, script="main_multi_gpu.py", code=0)
    assert metrics(run, "val") == metrics(tmp_path / "healthy", "val")


def begin_on_shards(begin: Callable[..., Started], tmp_path: Path, *words: object) -> Started:
    """A run on two tar files, 20 images each, that has trained for two epochs."""
    data, run = write_set(tmp_path / "data", [20, 20]), tmp_path / "run"
    shards = ("DATA.DATASET=shards", "-num_classes", 3, "-data_path", data, "REPORT_FREQ=1", "SAVE_FREQ=1000")
    started = begin(*(word for word in MODEL if "DATASET" not in word), *shards, "-output", run, *words)
    until(lambda: reported(run) > 8 or not started.running(), 60)
    return started


def test_run_whose_tar_files_go_ends_as_if_they_were_there(begin: Callable[..., Started], tmp_path: Path) -> None:
    started = begin_on_shards(begin, tmp_path, "TRAIN.NUM_EPOCHS=40", "VALIDATE_FREQ=20")
    shutil.rmtree(tmp_path / "data")  # the open files are still readable
    done = started.end(60).expect(0)
    assert done.out.splitlines()[-1].startswith("Done: best top-1")
    assert "95 % interval" in done.out


def test_tar_file_that_is_cut_off_in_training_is_named_at_once(begin: Callable[..., Started], tmp_path: Path) -> None:
    started = begin_on_shards(begin, tmp_path, *ENDLESS)
    tar = tmp_path / "data" / "train" / "0001.tar"
    os.truncate(tar, 5000)
    before = time.monotonic()
    done = started.end(60).expect(1)
    assert time.monotonic() - before < 20, "no pauses as after a storage error"
    assert f"{tar} was cut off while in use: it ends before byte" in done.err
    assert "its storage may hang" not in done.err


LATE = """
from vitamp import loss
from vitamp.errors import UserError

calls = []


@loss
def late(logits, targets):
    calls.append(0)
    if len(calls) > 40:
        raise UserError("the folder is gone")
    return logits.float().square().mean()
"""


def test_what_goes_wrong_after_the_first_update_is_no_usage_error(vitamp: Vitamp, tiny: Path, tmp_path: Path) -> None:
    (own := tmp_path / "late.py").write_text(LATE)
    done = vitamp("-cfg", tiny, "-use", own, "TRAIN.LOSS=late", "-output", tmp_path / "run", code=1)
    assert "the folder is gone" in done.err
