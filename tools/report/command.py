"""Write an HTML report of one or several runs: metrics, curves, time, precision, predictions.

    python scripts/report.py runs/a
    python scripts/report.py runs/amp runs/fp32 -out compared.html
    python scripts/report.py runs/a -no_predictions

The report is one HTML file that needs no network and runs no script; it adapts to light and dark mode and to any width.
Without -out, it is report.html in the run's folder, or for several runs in the nearest folder that contains them all
(the current folder if that is /). Runs that are still training or were cut off can be reported too.
"""

from dataclasses import replace

from tools.common.command_line import OVERWRITE, PART, TRUST, Tool, check_one_process, model_at, tool
from utils.errors import EXIT_DONE, UserError
from utils.flags import Flag, Positional
from utils.log import log, log_lines

OWN = (
    Flag("out", "file to write", "FILE.html", default_text="report.html in the run's folder"),
    OVERWRITE,
    replace(PART, about="evaluate the best checkpoint on this split of the run's data", default="val", default_text=""),
    Flag("data_path", "where the run's images are now, if they were moved", "DIR"),
    Flag("no_predictions", "leave out predictions, and do not evaluate the best checkpoint"),
    *TRUST,
)
TOOL = Tool("report.py", __doc__, OWN, (Positional("runs", "RUN", "a run's folder", "+", model_at),), settings=False)


@tool
def main(argv: list[str]) -> int:
    """Write the page of the given runs, and log the verdict on them."""
    command_line = TOOL.read(argv)
    options = command_line.asked
    for flag in ("part", "data_path"):
        if options.no_predictions and flag in command_line.given:
            value = vars(options)[flag]
            raise UserError(f"-{flag} {value}: -no_predictions evaluates no split; leave one of them out.")
    out = command_line.file("out", ".html", ".htm")
    check_one_process("report.py")

    # Imported late: torch takes seconds to import, and a wrong command should fail at once.
    from tools.common.contenders import verdict_of
    from tools.common.report_page.page import write_report
    from tools.common.report_page.runs import folders_of

    verdict = verdict_of(folders_of(options.runs))  # no lines for a single run
    page = write_report(
        options.runs,
        out,
        verdict="\n".join(verdict) or None,
        predictions=not options.no_predictions,
        part=options.part,
        data_path=options.data_path,
    )
    log_lines(verdict)
    log.info("Report: %s", page)
    return EXIT_DONE
