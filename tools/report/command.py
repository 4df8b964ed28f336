"""A page about a run, or about several beside each other: figures, curves, confusion, mistakes, precision, time.

    python scripts/report.py runs/a
    python scripts/report.py runs/amp runs/fp32 -out compared.html
    python scripts/report.py runs/a -no_predictions

It is one HTML file for any browser, light or dark, wide or narrow, that needs no network and runs no script. Without
-out it is report.html in the run's folder, or in the one that holds all of them; in the current folder where only /
does. A run that still trains, or was cut off, can be looked at too. Flags:
"""

from __future__ import annotations

import argparse
from pathlib import Path

from tools.common.command_line import run_tool, tool_parser
from utils.errors import EXIT_DONE, UserError
from utils.log import log


def main(argv: list[str]) -> int:
    return run_tool(_report, argv)


def _parser() -> argparse.ArgumentParser:
    parser = tool_parser("report.py", __doc__)
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="a run's folder")
    parser.add_argument("-out", "--out", type=Path, metavar="FILE.html", help="where to write the page")
    parser.add_argument(
        "-no_predictions", "--no_predictions", action="store_true", help="do not load the weights and the images"
    )
    return parser


def _report(argv: list[str]) -> int:
    asked = _parser().parse_args(argv)
    out: Path | None = asked.out
    if out is not None and out.suffix.lower() not in (".html", ".htm"):
        raise UserError(f"-out {out}: name a file that ends in .html.")

    from tools.common.report_page.page import write_report

    log.info("Report: %s", write_report(asked.runs, out, predictions=not asked.no_predictions))
    return EXIT_DONE
