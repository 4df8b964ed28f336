"""Checks of many files or names in one test each: one test per file takes longer than most of these checks do."""

from collections.abc import Callable, Iterable
from typing import TypeVar

Checked = TypeVar("Checked")


def for_each(things: Iterable[Checked]) -> Callable[[Callable[[Checked], None]], Callable[[], None]]:
    """Make a test of a check: it checks all `things`, and fails with every one that fails."""
    checked = list(things)

    def test_of(check: Callable[[Checked], None]) -> Callable[[], None]:
        def test() -> None:
            failed = []
            for thing in checked:
                try:
                    check(thing)
                except AssertionError as error:
                    failed.append(f"{thing}: {error}")
            assert not failed, "\n".join(failed)

        # Not functools.wraps: pytest would see the parameter of `check` and look for a fixture of its name.
        test.__name__, test.__doc__, test.__module__ = check.__name__, check.__doc__, check.__module__
        return test

    return test_of
