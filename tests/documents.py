"""The pages of README and docs: their blocks, the commands in them, their links."""

import re
import shlex
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.program import ROOT
from utils.program import ENTRIES

PAGES = sorted(
    [
        ROOT / "README.md",
        ROOT / "SECURITY.md",
        ROOT / "CONTRIBUTING.md",
        ROOT / "scripts" / "README.md",
        ROOT / "tests" / "README.md",
        *ROOT.glob("docs/**/*.md"),
    ]
)
MARK = re.compile(r"<!-- (runs|not checked)(?:: (.+?))? -->")
INSTALLED = {name: f"{script}.py" for script, name in ENTRIES.items()} | {
    file.stem: f"scripts/{file.name}" for file in ROOT.glob("scripts/*.py")
}
"""Subcommand of `vitamp` -> script"""
SCRIPT = re.compile(r"(?:main_(?:single|multi)_gpu|(?:bench|scripts)/\w+)\.(?:py|sh)")


@dataclass(frozen=True)
class Block:
    """Code between ``` and ```, and what the comment in the line before says of it."""

    page: str
    line: int
    text: str
    mark: str = ""
    why: str = ""

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks() -> Iterator[Block]:
    for path in PAGES:
        page, before, start, kept = str(path.relative_to(ROOT)), "", None, list[str]()
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
            if not line.startswith("```"):
                kept.append(line)
                before = before if start is not None else line
            elif start is None:
                start, kept = number, []
            else:
                found = MARK.fullmatch(before.strip())
                marks = (found[1], found[2] or "") if found else ("", "")
                yield Block(page, start, "\n".join(kept), *marks)
                start, before = None, ""


def commands(text: str) -> Iterator[list[str]]:
    """The commands of ours in it, in words from the script's name on."""
    for line in re.sub(r"\\\n", " ", text).splitlines():
        if not SCRIPT.search(line) and not line.lstrip().startswith("vitamp "):
            continue
        for piece in re.split(r"\s(?:\||&&|;)\s", line):
            words = shlex.split(piece, comments=True)
            if words[:1] == ["vitamp"] and words[1:2] and words[1] in INSTALLED:
                yield [INSTALLED[words[1]], *words[2:]]
                continue
            at = next((n for n, word in enumerate(words) if SCRIPT.fullmatch(word.removeprefix("./"))), None)
            # What is put behind a script's name in an output, or in a sentence, is no command.
            if at is not None and at > 0 and _calls(words[:at]):
                yield [words[at].removeprefix("./"), *words[at + 1 :]]


def _calls(before: list[str]) -> bool:
    caller = [word for word in before if not re.match(r"[A-Z_]+=", word)]
    return bool(caller) and Path(caller[0]).name in {"python", "bash", "torchrun", "srun", "mpirun", "sbatch"}


def spans(path: Path) -> Iterator[str]:
    """`code` in running text and tables."""
    outside = re.sub(r"^```.*?^```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    yield from re.findall(r"`([^`\n]+)`", outside)


def tracked_files() -> Iterator[str]:
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout
    yield from (name for name in filter(None, listed.decode().split("\0")) if (ROOT / name).is_file())
