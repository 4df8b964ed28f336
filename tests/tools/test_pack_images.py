"""scripts/pack_images.py: what it writes, resumes, refuses and verifies."""

import errno
import io
import json
import multiprocessing
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from datasets import check_dataset, open_dataset
from datasets.sources.files import FileSamples
from engine.preflight import fill_in
from tests.program import all_bytes
from tests.waiting import until
from tools.pack_images.command import main
from utils.config import load_config
from utils.config.data import DataConfig
from utils.errors import UserError

CPU = torch.device("cpu")


def pack(*words: object) -> int:
    """Call pack_images.py in this process: starting another takes seconds."""
    return main([str(word) for word in words])


def photograph(path: Path, seed: int, size: tuple[int, int] = (96, 64), **how: Any) -> Path:
    """Write an image with smooth colours, which JPEG keeps well."""
    path.parent.mkdir(parents=True, exist_ok=True)
    coarse = np.random.default_rng(seed).integers(0, 256, (5, 7, 3), dtype=np.uint8)
    Image.fromarray(coarse).resize(size, Image.Resampling.BICUBIC).save(path, **{"quality": 95, **how})
    return path


def members(folder: Path, part: str) -> dict[str, bytes]:
    found = {}
    for path in sorted((folder / part).iterdir()):
        with tarfile.open(path) as tar:
            for member in tar:
                file = tar.extractfile(member)
                assert file is not None
                found[member.name] = file.read()
    return found


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Class folders of 12 + 5 photographs of 96 x 64, the training ones of many kinds."""
    root = tmp_path_factory.mktemp("source")
    for k in range(12):
        photograph(root / "train" / "abc"[k % 3] / f"{k}.jpg", k, size=(96, 64) if k % 2 else (64, 96))
    for k in range(5):
        photograph(root / "val" / "abc"[k % 3] / f"{k}.jpg", 100 + k)
    photograph(root / "train" / "a" / "small.jpg", 50, size=(40, 30), progressive=True)
    photograph(root / "train" / "b" / "lossless.png", 51)
    Image.new("L", (90, 70), 77).save(root / "train" / "c" / "grey.jpg")
    return root


def opened(folder: Path, train: bool, dataset: str = "shards", classes: int = 3) -> Any:
    data = DataConfig.model_validate({"DATASET": dataset, "DATA_PATH": str(folder), "IMAGE_SIZE": 24})
    check_dataset(data, classes)
    return open_dataset(data, train, classes, 0, CPU)


def test_images_become_small_baseline_jpegs(source: Path, tmp_path: Path) -> None:
    assert pack(source, tmp_path / "packed", "-short_side", 48, "-shard_images", 5) == 0
    found = members(tmp_path / "packed", "train")
    sizes, kept = [], 0
    for name, content in found.items():
        if name.endswith(".cls"):
            continue
        with Image.open(io.BytesIO(content)) as image:
            sizes.append(image.size)
            if min(image.size) < 48:
                kept += content == (source / "train" / "a" / "small.jpg").read_bytes()
                continue
            assert image.format == "JPEG"
            assert "progressive" not in image.info
            if image.mode == "RGB":
                assert image.layer[0][1:3] == (2, 2), "brightness"  # pyright: ignore
                assert image.layer[1][1:3] == (1, 1), "colours at half the resolution"  # pyright: ignore
    assert kept == 1, "small images are not enlarged"
    assert sorted(sizes) == sorted([(72, 48)] * 7 + [(48, 72)] * 6 + [(62, 48), (40, 30)])
    told = json.loads((tmp_path / "packed" / "dataset.json").read_text())
    assert [len(told["parts"][part]["shards"]) for part in ("train", "val")] == [3, 1]
    assert (told["left_out"], told["classes"]) == ([], ["a", "b", "c"])
    assert not (tmp_path / "packed" / ".packing").exists()


def test_packed_images_keep_labels_and_pixels(source: Path, tmp_path: Path) -> None:
    assert pack(source, tmp_path / "packed", "-short_side", 60, "-quality", 95) == 0
    places = ((source, "imagefolder"), (tmp_path / "packed", "shards"))
    before, after = (opened(place, True, name) for place, name in places)
    assert after.classes == before.classes
    assert sorted(after.samples.labels) == sorted(before.samples.labels)
    assert after.samples.labels.tolist() != before.samples.labels.tolist(), "training images are shuffled"
    one, two = (opened(place, False, name).__getitems__([(0, k) for k in range(5)]) for place, name in places)
    assert one.labels.tolist() == two.labels.tolist()
    assert (one.images.float() - two.images.float()).abs().mean() < 3


def test_keep_copies_bytes_and_validates_the_same(imagenet: Path, tmp_path: Path) -> None:
    packed = tmp_path / "packed"
    assert pack(imagenet, packed, "-keep", "-shard_images", 10) == 0
    for part, count in (("train", 24), ("val", 8)):
        files = sorted(path.read_bytes() for path in (imagenet / part).rglob("*.JPEG"))
        images = sorted(image for name, image in members(packed, part).items() if not name.endswith(".cls"))
        assert len(images) == count
        assert images == files
    words = {"DATA.DATASET": "shards", "DATA.DATA_PATH": f"{packed}", "MODEL.NUM_CLASSES": "4"}
    fill_in(load_config(words=words | {"DATA.BACKGROUND": "black"}))  # which is not fixed by packing
    keys = [(0, k) for k in range(8)]
    one, two = opened(imagenet, False, "imagenet2012", 4), opened(packed, False, "shards", 4)
    for ours, theirs in zip(one.__getitems__(keys), two.__getitems__(keys), strict=True):
        assert torch.equal(ours, theirs)


def test_raw_stores_resized_pixels(source: Path, tmp_path: Path) -> None:
    assert pack(source, tmp_path / "packed", "-raw", "-short_side", 48) == 0
    found = members(tmp_path / "packed", "val")
    arrays = [np.load(io.BytesIO(content)) for name, content in found.items() if name.endswith(".npy")]
    assert [array.shape for array in arrays] == [(48, 72, 3)] * 5
    with Image.open(source / "val" / "a" / "0.jpg") as image:
        assert np.array_equal(arrays[0], np.asarray(image.resize((72, 48), Image.Resampling.BICUBIC)))
    batch = opened(tmp_path / "packed", True).__getitems__([(1, k) for k in range(15)])
    assert batch.images.flatten(1).any(1).all()


def test_packing_is_reproducible(source: Path, tmp_path: Path) -> None:
    for name, jobs in (("one", 1), ("two", 3)):
        assert pack(source, tmp_path / name, "-short_side", 48, "-shard_images", 4, "-num_workers", jobs) == 0
    assert all_bytes(tmp_path / "one") == all_bytes(tmp_path / "two")


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Enough images that packing can be killed in the middle."""
    root = tmp_path_factory.mktemp("many")
    first = photograph(root / "train" / "a" / "0.jpg", 0, size=(1000, 800))
    for k in range(1, 80):
        os.link(first, root / "train" / "a" / f"{k}.jpg")
    photograph(root / "val" / "a" / "0.jpg", 1)
    (root / "train" / "b").mkdir()
    return root


def _become(words: list[str], out: Path) -> None:
    sys.stdout = sys.stderr = out.open("w")
    sys.exit(main(words))


@pytest.mark.parametrize("how", [signal.SIGKILL, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_killed_packing_resumes(many: Path, tmp_path: Path, how: signal.Signals) -> None:
    words = [f"{many}", f"{tmp_path}/packed", *["-short_side", "200", "-shard_images", "10", "-num_workers", "2"]]
    process = multiprocessing.get_context("fork").Process(target=_become, args=(words, tmp_path / "out"))
    process.start()
    until(lambda: any((tmp_path / "packed" / "train").glob("*.tar")) or not process.is_alive())
    assert process.is_alive(), (tmp_path / "out").read_text()
    shards = sorted((tmp_path / "packed" / "train").glob("*.tar"))
    os.kill(process.pid or 0, signal.SIGSTOP)
    second = pack(*words)
    os.kill(process.pid or 0, how)
    os.kill(process.pid or 0, signal.SIGCONT)
    process.join(60)
    assert second == 2, "refused while another packs"
    assert process.exitcode == (130 if how == signal.SIGINT else -9)
    if how == signal.SIGINT:
        assert "interrupted; finished tar files stay" in (tmp_path / "out").read_text()
    assert "Traceback" not in (tmp_path / "out").read_text()
    assert (tmp_path / "packed" / ".packing").is_dir()
    first = shards[0]
    written = first.stat().st_mtime_ns
    later = [path for path in (tmp_path / "packed" / "train").glob("*.tar") if path != first]
    for path in later:
        path.write_bytes(path.read_bytes()[:-1])  # cut off
    assert pack(*words) == 0
    assert first.stat().st_mtime_ns == written, "a finished shard is not packed again"
    assert pack(many, tmp_path / "fresh", *words[2:]) == 0
    assert all_bytes(tmp_path / "packed") == all_bytes(tmp_path / "fresh")


def test_full_disk_is_reported_and_packing_resumes(
    many: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=300k", "tmpfs", disk], check=False, capture_output=True)
    if mount.returncode:
        pytest.skip("only root may make a small disk")
    try:
        words = (many, disk / "packed", "-raw", "-short_side", 60, "-shard_images", 10, "-num_workers", 2)
        assert pack(*words) == 1
        said = capsys.readouterr().err
        assert re.search(rf"{disk}/packed/train/\d+\.tar cannot be written: No space left on device\. Finished", said)
        assert "the same command resumes" in said
        shards = list((disk / "packed" / "train").glob("*.tar"))
        written = {path: path.stat().st_mtime_ns for path in shards}
        assert 1 <= len(shards) < 8
        assert not list((disk / "packed" / "train").glob(".*")), "no partial shard is left"
        subprocess.run(["mount", "-o", "remount,size=9m", disk], check=True)
        assert pack(*words) == 0
        assert {path: path.stat().st_mtime_ns for path in shards} == written
        assert len(list((disk / "packed" / "train").glob("*.tar"))) == 8
    finally:
        subprocess.run(["umount", disk], check=True)


def spoil(source: Path, root: Path) -> Path:
    """A copy with a text file, an empty one and one that was cut off among the training images."""
    shutil.copytree(source, root)
    (root / "train" / "a" / "text.jpg").write_text("no image")
    (root / "train" / "b" / "empty.jpg").write_bytes(b"")
    whole = (root / "train" / "b" / "1.jpg").read_bytes()
    (root / "train" / "b" / "1.jpg").write_bytes(whole[: len(whole) // 2])
    return root


@pytest.mark.parametrize("how", ["-keep", "-raw", "-quality=80"])
def test_unreadable_images_are_named_and_left_out(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], how: str
) -> None:
    root = spoil(source, tmp_path / "spoiled")
    assert pack(root, tmp_path / "packed", how, "DATA.MAX_BAD=2") == 1
    assert "3 images cannot be read, and DATA.MAX_BAD allows 2" in capsys.readouterr().err
    assert not (tmp_path / "packed" / "dataset.json").exists()
    assert pack(root, tmp_path / "packed", how, "DATA.MAX_BAD=3") == 0
    said = capsys.readouterr()
    broken = ("train/a/text.jpg", "train/b/empty.jpg", "train/b/1.jpg")
    assert all(f"{root}/{name}" in said.err for name in broken), said.err
    assert "19 images in 2 tar files" in said.out
    assert f"3 left out. Train with: -dataset shards -data_path {tmp_path / 'packed'}" in said.out
    left_out = json.loads((tmp_path / "packed" / "dataset.json").read_text())["left_out"]
    assert len(left_out) == 3
    assert all(any(name in line for line in left_out) for name in broken)
    shutil.copy(root / "train" / "a" / "0.jpg", root / "train" / "b" / "1.jpg")
    assert pack(root, tmp_path / "packed", how) == 0
    assert re.search(r"packed lacks .*; pack repaired images into another folder\.", capsys.readouterr().err)


def test_bad_command_lines_are_refused(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], imagenet: Path
) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "diary.txt").write_text("mine")
    (tmp_path / "file").write_text("mine")
    shutil.copytree(source / "val", tmp_path / "high" / "photos")
    done = tmp_path / "done"
    assert pack(source, done, "-short_side", 48) == 0
    before = all_bytes(tmp_path)
    for words, said in (
        ([source], "needs SRC (what to pack) and DST (the folder to write); got 1"),
        ([], "got neither"),
        ([source, "a", "b"], "got 3"),
        ([source, tmp_path / "full"], "has other content, such as diary.txt"),
        ([source, tmp_path / "file"], "is a file; name a new or empty folder"),
        ([source, done, "-short_side", 50], "packed with short_side 48, not 50"),
        ([source, done, "-short_side", 48, "DATA.IMAGE_CHANNELS=1"], "packed with DATA.IMAGE_CHANNELS 3, not 1"),
        ([source, done, "-short_side", 48, "DATA.EXIF_ROTATE=true"], "packed with DATA.EXIF_ROTATE false, not true"),
        ([source, done, "-short_side", 48, "DATA.BACKGROUND=drop"], "packed with DATA.BACKGROUND white, not drop"),
        ([source, done, "-raw", "-short_side", 48], "packed with kind jpeg, not raw"),
        ([imagenet, done, "-short_side", 48], "packed from other images"),
        ([source, source / "packed"], "is inside"),
        ([tmp_path / "nowhere", tmp_path / "new"], "does not exist"),
        ([tmp_path / "high", tmp_path / "new"], "has one class, photos, so there is nothing to learn: try -data_path"),
        ([source, tmp_path / "new", "-raw", "-keep"], "-raw and -keep exclude each other"),
        ([source, tmp_path / "new", "-raw", "-quality", 80], "-quality has no effect with -raw"),
        ([source, tmp_path / "new", "-keep", "-short_side", 80], "-short_side has no effect with -keep"),
        ([source, tmp_path / "new", "-keep", "DATA.EXIF_ROTATE=true"], "DATA.EXIF_ROTATE has no effect with -keep"),
        ([source, tmp_path / "new", "-keep", "DATA.BACKGROUND=black"], "Leave it out here, and set it when training"),
        ([source, tmp_path / "new", "-quality", 101], "-quality 101: takes a whole number from 1 to 100"),
        ([source, tmp_path / "new", "-data_path", source], "-data_path: give the path as SRC"),
        ([source, tmp_path / "new", "-dataset", "digits"], "is held in memory"),
    ):
        assert pack(*words) == 2, said
        assert said in capsys.readouterr().err
    assert all_bytes(tmp_path) == before
    assert not (tmp_path / "new").exists()


def test_exif_rotation_is_applied_to_small_images(tmp_path: Path) -> None:
    """Photographs of 60 x 40: one with EXIF rotation, one without EXIF, one with orientation 1, which means upright."""
    orientation, folder = 0x0112, tmp_path / "src" / "train" / "a"
    for name, number in (("side", 6), ("plain", None), ("upright", 1)):
        exif = Image.Exif()
        if number:
            exif[orientation] = number
        photograph(folder / f"{name}.jpg", 3, size=(60, 40), exif=exif)
    photograph(tmp_path / "src" / "val" / "a" / "0.jpg", 4)
    (tmp_path / "src" / "train" / "b").mkdir()
    assert pack(tmp_path / "src", tmp_path / "packed", "DATA.EXIF_ROTATE=true", "DATA.BACKGROUND=mean") == 0
    words = {"DATA.DATASET": "shards", "DATA.DATA_PATH": f"{tmp_path / 'packed'}", "MODEL.NUM_CLASSES": "2"}
    assert fill_in(load_config(words=words)).config.DATA.EXIF_ROTATE, "what a run records"
    with pytest.raises(UserError, match=r"line: shards in .* packed with DATA\.BACKGROUND \[128, 128, 128\]\. Give"):
        fill_in(load_config(words=words | {"DATA.BACKGROUND": "black"}))
    assert pack(tmp_path / "src", tmp_path / "grey", "DATA.IMAGE_CHANNELS=1") == 0
    notes = fill_in(load_config(words=words | {"DATA.DATA_PATH": f"{tmp_path / 'grey'}"})).notes
    assert any("was packed in grey, but tools will see other images in colour" in note for note in notes)
    assert pack(tmp_path / "packed", tmp_path / "again", "-keep") == 0
    data = fill_in(load_config(words=words | {"DATA.DATA_PATH": f"{tmp_path / 'again'}"})).config.DATA
    assert (data.EXIF_ROTATE, data.BACKGROUND) == (True, (128, 128, 128))
    packed = [content for name, content in members(tmp_path / "packed", "train").items() if name.endswith(".jpg")]
    kept = [(folder / f"{name}.jpg").read_bytes() for name in ("plain", "upright")]
    (turned,) = (content for content in packed if content not in kept)
    assert len(packed) == 3, "upright images are kept unchanged"
    with Image.open(io.BytesIO(turned)) as image, Image.open(folder / "side.jpg") as original:
        assert not image.getexif().get(orientation), "the tag is gone, so that it is not rotated again"
        upright = np.asarray(original.transpose(Image.Transpose.ROTATE_270), dtype=int)
        assert np.abs(np.asarray(image, dtype=int) - upright).mean() < 4


def test_storage_error_stops_packing_and_leaves_no_image_out(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("datasets.damage.PAUSES", (0.01,))
    lost = source / "train" / "a" / "0.jpg"
    words = (source, tmp_path / "packed", "-keep", "-shard_images", 4, "-num_workers", 1, "DATA.MAX_BAD=5")

    def read(samples: FileSamples, index: int) -> bytes:
        if samples.name(index) == str(lost):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return Path(samples.name(index)).read_bytes()

    with monkeypatch.context() as patch:
        patch.setattr(FileSamples, "read", read)
        assert pack(*words) == 1
    said = capsys.readouterr().err
    assert f"{lost} cannot be read: Input/output error" in said
    assert "When the storage is back, the same command resumes" in said
    assert not list(tmp_path.rglob("*.part"))
    assert pack(*words) == 0
    assert lost.read_bytes() in members(tmp_path / "packed", "train").values()
    assert "0 left out" in capsys.readouterr().out


def test_settings_are_written_atomically(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The disk takes 100 bytes, about half of the settings file."""
    words = (source, tmp_path / "packed", "-keep")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
        assert pack(*words) == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "packed cannot be written: " in capsys.readouterr().err
    assert not [path for path in tmp_path.glob("packed/.packing/*") if path.is_file()]
    assert pack(*words) == 0


def test_source_is_recognised_under_any_spelling_of_its_path(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source = shutil.copytree(source, tmp_path / "src")
    lines = [f"{path.relative_to(source)},{path.parent.name}\n" for path in sorted(source.rglob("*.jpg"))]
    (source / "all.csv").write_text("path,target\n" + "".join(lines))
    monkeypatch.chdir(source)
    for dataset, ways in (
        ("csv", (source / "all.csv", "all.csv", "./all.csv", f"{source}/../src/all.csv")),
        ("imagefolder", (source, ".", f"{source}/", "../src")),
        ("shards", (tmp_path / "csv", f"file://{tmp_path}/csv", f"file://{tmp_path}/csv/")),
    ):
        for way in ways:
            assert pack(way, tmp_path / dataset, "-keep", "-dataset", dataset) == 0, capsys.readouterr().err
        assert capsys.readouterr().out.count("is packed already") == len(ways) - 1


def test_one_image_per_class_is_packed_for_training(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number in range(3):
        photograph(tmp_path / "set" / f"class{number}" / "0.jpg", number)
    (tmp_path / "none.txt").write_text("class9/0.jpg")
    assert pack(tmp_path / "set", tmp_path / "out", "DATA.DOWNLOAD=true", f"DATA.EXCLUDE={tmp_path / 'none.txt'}") == 0
    said = capsys.readouterr()
    assert "1 of its lines match no image" in said.err
    assert "Here all images are packed as training images." in said.err
    assert "outputs stay unused" not in said.out
    assert len(members(tmp_path / "out", "train")) == 6
    assert not (tmp_path / "out" / "val").exists()
    assert pack(tmp_path / "set", tmp_path / "out") == 0
    assert "is packed already" in capsys.readouterr().out
    data = DataConfig(DATASET="shards", DATA_PATH=str(tmp_path / "out"), PART="all", IMAGE_CHANNELS=3)
    assert len(open_dataset(data, False, 3, 0, CPU)) == 3
