"""What the tools in scripts/ share with each other: exit codes, and flags of their own beside the entry scripts'."""

from __future__ import annotations

from collections.abc import Callable

from utils.cli import Flag
from utils.errors import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_USAGE, TrainingError, UserError
from utils.log import log, start_log


def run_tool(work: Callable[[list[str]], int], argv: list[str]) -> int:
    """Do `work`, and turn what stops it into a line of text and an exit code."""
    start_log(speaks=True)
    try:
        return work(argv)
    except UserError as error:
        log.error("%s", error)
        return EXIT_USAGE
    except TrainingError as error:
        log.error("%s", error)
        return EXIT_FAILED
    except KeyboardInterrupt:
        log.warning("interrupted; nothing was written")
        return EXIT_INTERRUPTED


def help_asked(argv: list[str], about: str | None, own: tuple[Flag, ...]) -> bool:
    """Print the help if it was asked for: what the tool is, and its own flags."""
    if not any(word.startswith("-") and word.lstrip("-") in ("h", "help") for word in argv):
        return False
    print(f"{about}\n" + "\n".join(f"  {f'-{flag.name} {flag.value}':<18}{flag.about}" for flag in own))
    return True
