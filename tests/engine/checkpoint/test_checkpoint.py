"""Checkpoints on disk: complete or not there at all, with damage detected."""

import errno
import json
import os
import shutil
from contextlib import suppress
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.checkpoint.find import find, newest_good
from engine.checkpoint.folder import prune
from tests.program import made_meta
from tests.saved import save_checkpoint
from utils.errors import UserError
from vitamp.checkpoints import (
    META,
    MODEL,
    STATE,
    Checkpoint,
    best_of,
    checkpoints_in,
    folder_name,
    inspect,
    read_index,
    update_in,
    verify,
    write_index,
)
from vitamp.meta import META_HASH
from vitamp.tensors import open_tensors, read_state

TENSORS = {MODEL: {"weight": torch.arange(6.0).reshape(2, 3).t(), "count": torch.tensor(3)}}
STATE_DICT = {"position": {"epoch": 1, "step": 0, "update": 1}, "numbers": [1, 2.5, None, "x"], "t": torch.ones(2)}


def save(root: Path, update: int, epoch: int | None = None, **meta: Any) -> Path:
    return save_checkpoint(root, update, TENSORS, STATE_DICT, made_meta(update, epoch or update, **meta))


def test_failed_save_leaves_no_files_and_keeps_older_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With EINVAL it does not fail: so answers a file system that cannot sync folders."""
    save(tmp_path, 1)

    def sync(handle: int) -> None:
        if Path(f"/proc/self/fd/{handle}").is_dir():
            raise OSError(errno.EINVAL if update == 3 else errno.EIO, "cannot be synced")

    monkeypatch.setattr(os, "fsync", sync)
    for update in (1, 2, 3):
        with suppress(OSError):
            save(tmp_path, update)
    assert sorted(path.name for path in tmp_path.iterdir()) == [folder_name(1), folder_name(3)]
    verify(inspect(tmp_path / folder_name(1)))


def test_kill_while_pruning_leaves_no_partial_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for update in (1, 2, 3):
        save(tmp_path, update)

    def killed(folder: Path, **_: object) -> None:
        for file in list(folder.glob(MODEL)):
            file.unlink()
            raise KeyboardInterrupt

    monkeypatch.setattr(shutil, "rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        prune(tmp_path, 1, folder_name(3), None)
    with pytest.raises(KeyboardInterrupt):
        save(tmp_path, 3, epoch=9)
    left = sorted(tmp_path.glob("step-*"))
    assert [folder.name for folder in left] == [folder_name(2), folder_name(3)]
    assert [verify(inspect(folder)).meta["epoch"] for folder in left] == [2, 9]
    monkeypatch.undo()
    save(tmp_path, 4)
    assert not list(tmp_path.glob(".tmp-*"))


@pytest.mark.parametrize(
    ("name", "harm"),
    [*product((MODEL, STATE, META), ("missing", "cut", "")), *product([META], ("null", "[]", "{", "\x00"))],
)
def test_damaged_newest_checkpoint_falls_back(
    tmp_path: Path, said: pytest.LogCaptureFixture, name: str, harm: str
) -> None:
    good, bad = save(tmp_path, 1), save(tmp_path, 2)
    data = (bad / name).read_bytes()
    (bad / name).write_bytes(data[:-20] if harm == "cut" else harm.encode())
    if harm == "missing":
        (bad / name).unlink()
    found = newest_good(tmp_path)
    assert found is not None
    assert found.folder == good
    (warning,) = said.messages
    assert bad.name in warning
    assert name in warning
    with pytest.raises(UserError, match=name):
        inspect(bad)  # without reading what may be gigabytes


def test_any_flipped_bit_in_meta_is_handled(tmp_path: Path) -> None:
    """With any bit flipped, meta.json is refused, unless it still says the same: only its own hash may be gone."""
    save(tmp_path, 1)
    bad = save(tmp_path, 2) / META
    whole = bad.read_bytes()
    fields = json.loads(whole)
    del fields[META_HASH]
    refused = 0
    for bit in range(0, 8 * len(whole), 3):
        data = bytearray(whole)
        data[bit // 8] ^= 1 << bit % 8
        bad.write_bytes(data)
        found = newest_good(tmp_path)
        assert found is not None
        refused += found.folder.name == folder_name(1)
        assert found.folder.name == folder_name(1) or fields.items() <= found.meta.items(), (bit, found.meta)
    assert refused > len(whole)


def test_index_round_trip_and_damage(tmp_path: Path) -> None:
    assert read_index(tmp_path) == {"last": None, "best": None}
    write_index(tmp_path, "step-2", "step-1")
    assert read_index(tmp_path) == {"last": "step-2", "best": "step-1"}
    for nothing in ("{", "[]", "5", '{"last": 3, "best": ["x"]}'):
        (tmp_path / "index.json").write_text(nothing, encoding="utf-8")
        assert read_index(tmp_path) == {"last": None, "best": None}


def test_best_checkpoint_is_kept_until_a_better_one_is_saved(tmp_path: Path) -> None:
    save(tmp_path, 1)
    write_index(tmp_path, folder_name(2), folder_name(1))
    assert best_of(tmp_path, 2) == folder_name(1), "saving the better one failed"
    assert best_of(tmp_path, None) == folder_name(1), "another metric decides, and nothing was validated by it yet"
    save(tmp_path, 2)
    assert best_of(tmp_path, 2) == folder_name(2)
    shutil.rmtree(tmp_path / folder_name(1))
    assert best_of(tmp_path, None) is None


@pytest.mark.parametrize(
    ("keep", "last", "best", "left"),
    [
        (2, 5, None, [4, 5]),
        (2, 5, 1, [1, 4, 5]),
        (1, 5, 5, [5]),
        (9, 5, 1, [1, 2, 3, 4, 5]),
        (0, 5, None, [1, 2, 3, 4, 5]),
        (2, 4, 1, [1, 3, 4, 5]),  # what is newer than the last is not the run's to remove
    ],
)
def test_prune_keeps_newest_best_and_later_ones(
    tmp_path: Path, keep: int, last: int, best: int | None, left: list[int]
) -> None:
    for update in range(1, 6):
        save(tmp_path, update)
    prune(tmp_path, keep, folder_name(last), folder_name(best) if best else None)
    assert sorted(path.name for path in tmp_path.iterdir()) == [folder_name(update) for update in left]


def test_prune_leaves_what_it_did_not_write_and_with_keep_every_what_is_unreadable(tmp_path: Path) -> None:
    elsewhere = save(tmp_path / "elsewhere", 2)
    (tmp_path / folder_name(2)).symlink_to(elsewhere)
    (tmp_path / folder_name(1)).mkdir()
    (tmp_path / folder_name(1) / "notes.txt").write_text("mine")
    for update in (3, 4, 5, 6):
        save(tmp_path, update, epoch_finished=True)
    (tmp_path / folder_name(3) / STATE).unlink()
    (tmp_path / folder_name(5) / META).write_text("{")
    prune(tmp_path, 1, folder_name(6), None, every=3)
    assert sorted(path.name for path in tmp_path.glob("*step*")) == [folder_name(update) for update in (1, 2, 3, 5, 6)]
    assert not list(tmp_path.glob(".tmp-*"))
    assert (tmp_path / folder_name(1) / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize(
    ("name", "update"),
    [("step-000000005", 5), ("step-1234567890", 1234567890)]
    + [(name, None) for name in ("step-5", "step-0000000005", "step-000000005.mine", "step-00000000\u0665", "step-")],
)
def test_only_written_names_are_checkpoints(tmp_path: Path, name: str, update: int | None) -> None:
    (tmp_path / name).mkdir()
    assert update_in(name) == update
    assert checkpoints_in(tmp_path) == ({} if update is None else {update: tmp_path / name})
    (tmp_path / name).rmdir()
    (tmp_path / name).touch()
    assert checkpoints_in(tmp_path) == {}, "a file is no checkpoint"


def test_hidden_folders_of_the_user_are_kept(tmp_path: Path) -> None:
    own = {tmp_path / name for name in (".tmp-mine", ".tmp-5-backup", ".tmp-old-copies", ".tmp-gone-step-5.mine")}
    ours = {tmp_path / name for name in (".tmp-5-77", ".tmp-old-step-000000001", ".tmp-gone-step-000000002")}
    for folder in own | ours:
        folder.mkdir()
    for update in (1, 2):
        save(tmp_path, update)
    assert set(tmp_path.iterdir()) == own | {tmp_path / folder_name(update) for update in (1, 2)}


def test_checkpoint_of_another_update_than_its_name_is_refused(tmp_path: Path) -> None:
    folder = save(tmp_path, 22)
    meta = {**json.loads((folder / META).read_text()), "update": 12}
    (folder / META).write_text(json.dumps(meta))
    with pytest.raises(UserError, match="damaged or edited"):
        inspect(folder)
    del meta[META_HASH]  # as by an older version
    (folder / META).write_text(json.dumps(meta))
    with pytest.raises(UserError, match=r"is of update 12\. If you renamed the folder, name it step-000000012 again"):
        inspect(folder)
    assert inspect(folder.rename(tmp_path / "copy")).meta["update"] == 12, "a copy may have any name"
    assert inspect((tmp_path / "copy").rename(tmp_path / folder_name(12)))


def test_others_may_read_it_and_a_file_that_may_not_be_read_is_not_called_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save(tmp_path, 1)
    assert len({file.stat().st_mode for file in folder.iterdir()}) == 1

    def denied(*_: Any) -> Any:
        raise OSError(5, "Input/output error", str(folder / MODEL))

    monkeypatch.setattr("vitamp.checkpoints.hashlib.file_digest", denied)
    with pytest.raises(UserError, match=rf"{MODEL}: cannot be read \(Input/output error\)"):
        verify(inspect(folder))


def test_inspect_names_missing_or_unreadable_file(tmp_path: Path) -> None:
    (tmp_path / MODEL).write_bytes(b"nonsense")
    with pytest.raises(UserError, match=MODEL):
        dict(open_tensors(Checkpoint(tmp_path, {})))
    with pytest.raises(UserError, match=STATE):
        read_state(Checkpoint(tmp_path, {}))


def test_find_accepts_run_checkpoints_folder_checkpoint_or_file(tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    first, second = save(root, 1), save(root, 2)
    (tmp_path / "config.yaml").touch()
    for path in (tmp_path, root, tmp_path / "config.yaml", root / "index.json", second, second / MODEL):
        write_index(root, second.name, None)
        assert find(path).folder == second
    assert find(first).folder == find(first / STATE).folder == first
    with pytest.raises(UserError, match="no such file"):
        find(tmp_path / "nowhere")
