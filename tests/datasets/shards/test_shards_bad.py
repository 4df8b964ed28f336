"""Shards that are damaged, malicious or of another kind."""

import gzip
import json
import os
import re
import tarfile
from pathlib import Path

import pytest

from datasets import check_dataset
from datasets.base import Unreadable
from tests.datasets.opened import of_shards, part, settings
from tests.datasets.shards.tar_files import picture, samples, write_set, write_tar
from tests.program import Vitamp
from tests.refused import refusal
from utils.errors import UserError


def check(place: object) -> None:
    check_dataset(of_shards(place), 3)


def test_damaged_shard_is_refused_with_the_offset(tmp_path: Path) -> None:
    """Samples behind the damage are never lost silently."""
    shard = write_set(tmp_path) / "train" / "0001.tar"
    with tarfile.open(shard) as opened:
        starts = [member.offset for member in opened.getmembers()]
    tar, second, third, last = shard.read_bytes(), starts[2], starts[4], starts[-2]
    for damage, content, lost in (
        ("cut in the last image", tar[: last + 1000], last),
        ("cut between members", tar[:last], last),
        ("cut in a header", tar[: last + 100], last),
        ("a header overwritten", tar[:second] + b"x" * 512 + tar[second + 512 :], second),
        ("a hole over two members", tar[:second] + bytes(third - second) + tar[third:], second),
        ("only room after the first image", tar[:second] + bytes((1 << 20) + 512), second),
    ):
        shard.write_bytes(content)
        said = refusal(check, tmp_path)
        assert re.search(rf"train/0001\.tar is damaged or cut off.* data at byte {lost:,} ", said), damage


def test_trailing_zeros_of_a_shard_are_accepted(tmp_path: Path) -> None:
    """Programs write different numbers of them."""
    shard = write_set(tmp_path) / "train" / "0001.tar"
    for blocks in (1, 2, 2047):
        with tarfile.open(shard) as tar:
            end = tar.getmembers()[-1].offset_data + 512
        shard.write_bytes(shard.read_bytes()[:end] + bytes(512 * blocks))
        check(tmp_path)


def test_shard_cut_off_after_indexing_is_reported(tmp_path: Path, vitamp: Vitamp) -> None:
    """A running training names shard and byte; a new one names the shard before it starts."""
    train = part(of_shards(write_set(tmp_path)))
    shard = tmp_path / "train" / "0001.tar"
    os.truncate(shard, 5000)
    assert train.read(5) == picture(5)
    with pytest.raises(Unreadable, match=r"train/0001\.tar was cut off while in use: it ends before byte \d+"):
        train.read(7)
    done = vitamp("-dataset", "shards", "-data_path", tmp_path, "-num_classes", 3, "-batch_size", 4, "-dry_run", code=2)
    assert f"{shard} is damaged or cut off" in done.err


def pax_size(size: int) -> list[tarfile.TarInfo]:
    """A member whose extended header gives another size."""
    info = tarfile.TarInfo("a.txt")
    info.pax_headers = {"size": str(size)}
    return [info]


def pax_headers(number: int) -> list[tarfile.TarInfo]:
    """Extended headers that belong to one another instead of a file."""
    infos = [tarfile.TarInfo(f"{k}") for k in range(number)]
    for info in infos:
        info.type = tarfile.XHDTYPE
    return infos


@pytest.mark.parametrize("first", [True, False], ids=["first", "later"])
@pytest.mark.parametrize("members", [pax_size(-1536), pax_size(-512), pax_size(10**30), pax_headers(3000)])
def test_absurd_tar_headers_are_refused(tmp_path: Path, members: list[tarfile.TarInfo], first: bool) -> None:
    """Neither read for ever nor a traceback."""
    others = samples([1, 2])
    write_tar(write_set(tmp_path) / "train" / "0001.tar", [*members, *others] if first else [*others, *members])
    with pytest.raises(UserError, match=r"0001\.tar (is damaged or cut off|cannot be read as a tar file)"):
        check(tmp_path)


@pytest.mark.parametrize("name", ["../0009.png", "a/../../0009.png", "/etc/0009.png"])
def test_tar_members_that_lead_out_are_refused(tmp_path: Path, name: str) -> None:
    write_tar(write_set(tmp_path) / "train" / "0001.tar", [*samples([1]), (name, picture(9)), ("0009.cls", b"0")])
    with pytest.raises(UserError, match=r"0001\.tar: the member '.*0009\.png' leads out"):
        check(tmp_path)
    assert not list(tmp_path.rglob("*.png")), "nothing is ever extracted"


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.FIFOTYPE])
def test_links_and_devices_in_tar_files_are_skipped(
    tmp_path: Path, kind: bytes, said: pytest.LogCaptureFixture
) -> None:
    link = tarfile.TarInfo("0009.png")
    link.type, link.linkname = kind, "/etc/passwd"
    write_tar(write_set(tmp_path) / "train" / "0001.tar", [link, ("0009.cls", b"0"), *samples([1, 2])])
    check(tmp_path)
    assert "split train: skipped links and other members that are not files 1 (0009.png)" in said.text
    assert "index of 11 images" in said.text


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.txt", b"", r"a\.png has no label: there is no a\.cls beside it"),
        ("a.json", b'{"width": 30}', r"a\.png has no label"),
        ("a.json", b'{"label": ', r"a\.json has no valid label"),
        ("a.json", b'{"label": 1.5}', r"a\.json has no valid label: '1\.5' is not a whole"),
        ("a.json", b'{"label": true}', r"a\.json has no valid label: 'True' is not a whole"),
        ("a.json", b'{"label": ' + b"9" * 5000 + b"}", r"a\.json has no valid label"),
        ("a.json", b"[" * 90_000, r"a\.json has no valid label"),
        ("a.cls", b"", r"a\.cls has no valid label: '' is not a whole number"),
        ("a.cls", b"\xff\xfe", r"a\.cls has no valid label"),
        ("a.cls", b"cat", r"no valid label: 'cat' is not a whole .* lines of classes\.txt"),
        ("a.cls", b"3", r"a\.png: label 3 does not fit MODEL\.NUM_CLASSES 3: labels go from 0 to 2"),
        ("a.cls", b"9" * 30, r"a\.cls has the label 9+, which is too large"),
        ("a.cls", b"9" * 5000, r"a\.cls has the label 9{40}, which is too large"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bad_labels_in_tar_files_are_refused(tmp_path: Path, name: str, content: bytes, said: str) -> None:
    write_tar(write_set(tmp_path, [2]) / "train" / "0000.tar", [("a.png", picture(0)), (name, content)])
    with pytest.raises(UserError, match=said):
        check(tmp_path)


def test_tar_files_without_images_or_with_two_of_a_sample_are_refused(tmp_path: Path) -> None:
    shard = write_set(tmp_path, [2]) / "train" / "0000.tar"
    write_tar(shard, [("a.txt", b"nothing to see")])
    with pytest.raises(UserError, match="have no images"):
        check(tmp_path)
    write_tar(shard, [("a.png", picture(0)), ("a.jpg", picture(1)), ("a.cls", b"0")])
    with pytest.raises(UserError, match=r"a\.jpg and a\.png are two images of one sample"):
        check(tmp_path)


def test_more_or_fewer_shard_classes_than_labels_are_refused(tmp_path: Path) -> None:
    names = write_set(tmp_path) / "classes.txt"
    names.write_text("a\nb\nc\nd\n")
    with pytest.raises(UserError, match=r"has 4 classes, but MODEL\.NUM_CLASSES is 3"):
        check(tmp_path)
    names.write_text("a\nb\n\n")
    with pytest.raises(UserError, match=r"has the label 2, but classes\.txt ends with 1\."):
        check(tmp_path)


@pytest.mark.parametrize(
    "content",
    [b"", b"no tar at all" * 99, bytes(100), gzip.compress(bytes(5000), mtime=0)],
    ids=["empty", "text", "zeros", "gzip"],
)
def test_files_that_are_not_tar_files_are_refused(tmp_path: Path, content: bytes) -> None:
    (write_set(tmp_path) / "train" / "0002.tar").write_bytes(content)
    with pytest.raises(UserError, match=r"train/0002\.tar cannot be read as a tar file: .*gunzip"):
        check(tmp_path)


def test_missing_shards_error_shows_the_expected_layout(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"needs DATA\.DATA_PATH"):
        check_dataset(settings(DATASET="shards"), 3)
    for place, said in (
        (tmp_path / "nowhere", "does not exist"),
        (tmp_path, "there is no tar file in"),
        ("memory://nothing/here", "there is no tar file in"),
        ("gopher://a/b", "cannot be opened: Protocol not known: gopher"),
    ):
        with pytest.raises(UserError, match=said):
            check(place)
    write_tar(tmp_path / "val" / "0.tar", samples([1]))
    with pytest.raises(UserError, match=r"(?s)no tar file for training.*Expected layout.*train/0000\.tar"):
        check(tmp_path)


def manifest(root: Path, **changes: object) -> None:
    """The manifest that packing would write for the tar files of write_set."""
    shards = {
        part: [
            {"name": f"{part}/{path.name}", "bytes": path.stat().st_size, "samples": 1}
            for path in sorted((root / part).iterdir())
        ]
        for part in ("train", "val")
    }
    about = {"made_by": "vitamp", "classes": ["a", "b", "c"], "parts": {k: {"shards": v} for k, v in shards.items()}}
    (root / "dataset.json").write_text(json.dumps({**about, **changes}))


def test_missing_or_changed_packed_shards_are_refused(tmp_path: Path) -> None:
    manifest(write_set(tmp_path))
    check(tmp_path)
    os.truncate(tmp_path / "train" / "0001.tar", 4096)
    with pytest.raises(UserError, match=r"train/0001\.tar has 4,096 bytes; dataset\.json lists it with \d+,"):
        check(tmp_path)
    (tmp_path / "train" / "0001.tar").unlink()
    with pytest.raises(UserError, match=r"train/0001\.tar is missing"):
        check(tmp_path)


@pytest.mark.parametrize("text", ["{", '{"made_by": "vitamp"}', '{"made_by": "vitamp", "parts": 3, "classes": null}'])
def test_damaged_manifest_is_refused(tmp_path: Path, text: str) -> None:
    (write_set(tmp_path) / "dataset.json").write_text(text)
    with pytest.raises(UserError, match=r"dataset\.json cannot be read"):
        check(tmp_path)


def test_manifest_of_another_program_is_ignored(tmp_path: Path) -> None:
    manifest(write_set(tmp_path), made_by="another program", parts=["of another form"])
    check(tmp_path)
