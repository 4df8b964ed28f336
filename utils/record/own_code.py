"""Copies of the user's own files (-use) in the run's folder, and what run.json and meta.json record of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import BaseModel

from utils.errors import UserError
from utils.files import write_atomically
from utils.own.execute import executed, noted_files, read
from utils.record.run_folder import ABOUT, read_about

FOLDER = "own_code"
FIELD = "own_code"
"""In run.json and meta.json"""


class Noted(BaseModel):
    """One file, as recorded."""

    file: str
    sha256: str
    registers: dict[str, str] = {}

    @property
    def copy_name(self) -> str:
        """A name for each version, so that older checkpoints still have theirs."""
        return f"{Path(self.file).stem}-{self.sha256[:8]}.py"

    def words(self) -> str:
        return f"{self.file} ({', '.join(f'{kind} {name}' for name, kind in self.registers.items())})"


def noted_of(values: object, where: Path) -> list[Noted]:
    """The field of run.json or meta.json. UserError if it is damaged."""
    try:
        return [Noted.model_validate(one) for one in (values if isinstance(values, list) else [])]
    except ValueError:
        raise UserError(f"{where}: the field {FIELD!r} is damaged. Name your files with -use.") from None


def noted_by_run(run: Path) -> list[Noted]:
    """The files that the run used when it was last started."""
    return noted_of(read_about(run).get(FIELD), run / ABOUT) if (run / ABOUT).exists() else []


def keep_own_code(run: Path) -> dict[str, Any]:
    """Copy the files that were executed into the run's folder. Returns the field for run.json."""
    (run / FOLDER).mkdir(exist_ok=True)
    for one in executed.values():
        write_atomically(run / FOLDER / Noted(**one.as_noted()).copy_name, one.source)
    return {FIELD: noted_files()}


def copy_of(run: Path | None, noted: Noted) -> Path:
    """The run's copy of a file. UserError if it is missing or was changed."""
    path = None if run is None else run / FOLDER / noted.copy_name
    if path is None or not path.is_file():
        raise UserError(f"There is no copy of {noted.file} beside these weights. Name the file itself: -use FILE.")
    if read(path)[1] != noted.sha256:
        raise UserError(
            f"{path}: the copy was changed (its sha256 is not {noted.sha256}). Name your own file: -use FILE."
        )
    return path
