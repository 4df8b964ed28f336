"""Check a tool's output file or folder before the work begins, and remember which files were written."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from utils.errors import UserError
from utils.record.run_folder import DATA, FILES_OF_A_RUN, check_writable, is_run_folder
from vitamp.checkpoints import CHECKPOINTS
from vitamp.files import kind_of_path, try_to_write
from vitamp.meta import META

written: list[Path] = []
"""Output files and folders that are complete"""
if_interrupted: list[str] = []
"""Last entry: what a resumable tool says when it is interrupted, in place of the list of written files"""


def check_output_file(path: Path, flag: str, fresh: bool = False, what: str = "file") -> Path:
    """Expand `path`, the value of `flag`, and check that a file (or a new folder) can be written there.

    Its parent folder must exist: a folder created by mistake is harder to find than an error. `fresh`: an existing file
    is an error. `what`: 'file' or 'folder', the word for it in errors. Raises UserError if it cannot be written.
    """
    path = path.expanduser()
    parent = path.absolute().parent
    where = f"{flag} {path}".lstrip()
    kind = kind_of_path(path)  # None if nothing is there
    exists = kind is not None
    parent_kind = kind_of_path(parent)
    if kind not in (None, "a file"):
        raise UserError(f"{where}: is {kind}; name a file.")
    if exists and (parent.name == CHECKPOINTS or (parent / META).is_file()):
        raise UserError(f"{where}: belongs to a checkpoint, which could not be used without it; name another file.")
    if exists and path.name in FILES_OF_A_RUN + (DATA,) and is_run_folder(parent):
        raise UserError(f"{where}: belongs to the run in this folder, which needs it; name another file.")
    if exists and fresh:
        raise UserError(f"{where}: already exists; name another file, or give -overwrite to replace it.")
    if parent_kind != "a folder":
        problem = f"the folder {path.parent} does not exist"
        if parent_kind:
            problem = f"{path.parent} is {parent_kind}, not a folder"
        raise UserError(f"{where}: {problem}; name a {what} in an existing folder.")
    try:
        if path.exists() and not os.access(path, os.W_OK):
            raise PermissionError(0, "this user may not overwrite it")
        try_to_write(path)
    except OSError as error:
        raise UserError(f"{where}: cannot be written ({error.strerror}); name another {what}.") from None
    return path


def check_output_folder(path: Path, flag: str, files: tuple[str, ...], fresh: bool) -> Path:
    """Expand `path`, the value of `flag`, and check that a folder with the files `files` can be written there.

    `fresh`: an existing folder must be empty; otherwise only `files` in it are replaced. Raises UserError if it cannot
    be written.
    """
    path = path.expanduser()
    if path.name in ("", ".."):  # '.' and '..' have no name of their own
        path = path.resolve()
    where = f"{flag} {path}"
    kind = kind_of_path(path)  # None if nothing is there
    if kind not in (None, "a folder"):
        raise UserError(f"{where}: is {kind}; name a folder.")
    if kind is None:
        # Whether a folder can be made there is the same question as for a file.
        return check_output_file(path, flag, what="folder")
    if is_run_folder(path):
        raise UserError(f"{where}: is the folder of a run; name another, such as {path / 'hub'}.")
    if fresh and any(path.iterdir()):
        raise UserError(
            f"{where}: is not empty; name another folder, or give -overwrite to replace {', '.join(files)} in it."
        )
    for name in files:
        check_output_file(path / name, flag)
    return path


def results_folder(path: Path) -> Path:
    """Expand `path`, the -output of a tool whose results fill a folder, and check that they can be written there."""
    path = path.expanduser()
    check_writable(path)
    return path


@contextlib.contextmanager
def writing(path: Path, flag: str) -> Iterator[None]:
    """Turn an OSError while `path` is written into a UserError about `flag`; add the path to `written` at the end."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or error
        raise UserError(f"{flag} {path}: cannot be written ({reason}).") from None
    if path not in written:
        written.append(path)
