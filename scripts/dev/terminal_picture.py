#!/usr/bin/env python3
"""Draw a run's log as a picture of a terminal, for light and for dark pages.

python main_single_gpu.py -cfg configs/vit_digits.yaml -amp -output runs/digits
python scripts/dev/terminal_picture.py runs/digits docs/results/terminal.svg
"""

from __future__ import annotations

import json
import re
import shlex
import sys
from html import escape
from pathlib import Path

COLUMNS = 116
SIZE, LINE_HEIGHT, MARGIN = 12.5, 19.0, 18.0
CHARACTER = 0.6 * SIZE
"""Width of a character in the monospace fonts that browsers use."""
TIME = re.compile(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d ")
BANNER = re.compile(r"^vitamp |^  (?:device|precision|model|data|batch|training) ")
EPOCH = re.compile(r"Epoch\[0*(\d+)/0*(\d+)\](?:, Step\[(\d+)/(\d+)\])?")
STYLE = """\
  .page { fill: #f6f8fa; stroke: #d0d7de } text { fill: #24292f }
  .command { fill: #1a7f37; font-weight: bold } .found { fill: #0550ae } .aside { fill: #6e7781 }
  @media (prefers-color-scheme: dark) {
    .page { fill: #0d1117; stroke: #30363d } text { fill: #e6edf3 }
    .command { fill: #3fb950 } .found { fill: #79c0ff } .aside { fill: #8b949e }
  }"""


def command_of(run: Path) -> str:
    """The command as a reader would type it, without the interpreter's path."""
    command = json.loads((run / "run.json").read_text(encoding="utf-8"))["command"]
    return shlex.join(["python", *shlex.split(command)[1:]])


def shown_lines(log: list[str]) -> list[str]:
    """The banner, the end of three epochs, and the last line; `...` where lines are left out."""
    epochs = max(int(found[2]) for line in log if (found := EPOCH.search(line)))
    wanted = {1, epochs // 4, epochs}
    shown: list[str] = []
    for number, line in enumerate(log):
        epoch = EPOCH.search(line)
        ends = epoch and int(epoch[1]) in wanted and epoch[3] == epoch[4]
        if BANNER.match(line) or number == len(log) - 1 or ends:
            shown.append(line)
        elif epoch and shown[-1] != "...":
            shown.append("...")
    return shown


def kind_of(line: str) -> str:
    if line.startswith("$"):
        return "command"
    if line.startswith(("-----", "Done")):
        return "found"
    return "aside" if line == "..." else "plain"


def picture(lines: list[str]) -> str:
    width, height = 2 * MARGIN + COLUMNS * CHARACTER, 2 * MARGIN + len(lines) * LINE_HEIGHT
    rows = []
    for number, line in enumerate(lines):
        text = line if len(line) <= COLUMNS else line[: COLUMNS - 1] + "…"
        y = MARGIN + (number + 0.75) * LINE_HEIGHT
        # Fonts differ in width; textLength gives every line the same columns.
        rows.append(
            f'<text x="{MARGIN:g}" y="{y:g}" class="{kind_of(line)}" textLength="{len(text) * CHARACTER:g}" '
            f'xml:space="preserve">{escape(text)}</text>'
        )
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" '
            f'font-family="ui-monospace, SFMono-Regular, Menlo, Consolas, monospace" font-size="{SIZE}">',
            f"<title>{escape(lines[0].removeprefix('$ '))}: first and last lines of its log</title>",
            f"<style>\n{STYLE}\n</style>",
            f'<rect x="0.5" y="0.5" width="{width - 1:g}" height="{height - 1:g}" rx="8" class="page"/>',
            *rows,
            "</svg>\n",
        ]
    )


def main(words: list[str]) -> int:
    if len(words) != 2:
        print(__doc__)
        return 2
    run, target = Path(words[0]), Path(words[1])
    log = [TIME.sub("", line) for line in (run / "log.txt").read_text(encoding="utf-8").splitlines()]
    target.write_text(picture([f"$ {command_of(run)}", *shown_lines(log)]), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
