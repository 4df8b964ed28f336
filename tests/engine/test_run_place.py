"""Where a run lies, and to which run a checkpoint belongs."""

import os
from pathlib import Path

import pytest

from utils.errors import UserError
from utils.record import run_folder
from utils.record.run_folder import check_output, make_folder
from vitamp.checkpoints import MODEL, run_folder_of
from vitamp.files import write_atomically


@pytest.fixture
def run(tmp_path: Path) -> Path:
    step = tmp_path / "run" / "checkpoints" / "step-000000001"
    step.mkdir(parents=True)
    for file in (step / MODEL, tmp_path / "run" / "config.yaml", tmp_path / "run" / "checkpoints" / "i"):
        file.touch()
    return tmp_path / "run"


def test_run_folder_of_a_checkpoint(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step = run / "checkpoints" / "step-000000001"
    monkeypatch.chdir(step.parent)
    (link := run.parent / "best").symlink_to(step)
    for path in (run, run / "config.yaml", step.parent, step.parent / "i", step, step / MODEL, Path(step.name), link):
        found = run_folder_of(path)
        assert found is not None, path
        assert found.resolve() == run


@pytest.mark.parametrize("place", ["elsewhere", "checkpoints/kept/good", "."])
def test_checkpoint_outside_a_run_has_no_run_folder(run: Path, place: str) -> None:
    """Even with a folder of that name further up, which is another's: the next run would be written there."""
    alone = run / place / "step-000000001"
    alone.mkdir(parents=True)
    (alone / MODEL).touch()
    assert run_folder_of(alone) is None
    assert run_folder_of(alone / MODEL) is None


def test_run_folder_with_a_run_is_rejected(run: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="already contains a run"):
        check_output(str(run), "out", None)
    with pytest.raises(UserError, match="already contains a run"):
        check_output(str(run), "out", tmp_path / "another")
    with pytest.raises(UserError, match="x: cannot be written \\(File name too long\\)"):
        check_output(str(tmp_path / ("x" * 256)), "out", None)
    check_output(str(run), "out", run)
    check_output(str(run), "out", run / ".." / "run")
    (tmp_path / "config.yaml").touch()
    with pytest.raises(UserError, match="is yours, which is not overwritten"):  # with -resume auto too
        check_output(str(tmp_path), "out", tmp_path)
    (tmp_path / "log.txt").touch()  # a run that was killed before it saved
    check_output(str(tmp_path), "out", tmp_path)
    check_output(str(tmp_path / "new" / "run"), "out", None)
    assert not (tmp_path / "new").exists(), "checking makes nothing"


def test_run_folders_made_in_the_same_second_differ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_folder.time, "strftime", lambda _form: "20260102-030405")
    made = [make_folder(None, str(tmp_path / "out"), "train").name for _ in range(3)]
    assert made == [f"train-20260102-030405{suffix}" for suffix in ("", "-2", "-3")]


def test_text_file_is_replaced_atomically(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "index.json"
    write_atomically(path, "old\n")

    def fail(_handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="No space"):
        write_atomically(path, "new, and longer\n")
    assert path.read_text(encoding="utf-8") == "old\n"
    monkeypatch.undo()
    write_atomically(path, "new\n")
    assert path.read_text(encoding="utf-8") == "new\n"
    assert [file.name for file in tmp_path.iterdir()] == ["index.json"]
