"""Progress bars of the tools."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

from tqdm import tqdm

T = TypeVar("T")


def progress_bar(total: int, unit: str, what: str | None = None) -> tqdm:
    """A bar on standard error, if that is a terminal. Log lines are printed above it."""
    return tqdm(total=total, unit=f" {unit}", desc=what, disable=None, leave=False, dynamic_ncols=True)


def progress(things: Sequence[T], unit: str, what: str | None = None) -> Iterator[T]:
    """Iterate over `things` with a bar."""
    with progress_bar(len(things), unit, what) as bar:
        for thing in things:
            yield thing
            bar.update()
