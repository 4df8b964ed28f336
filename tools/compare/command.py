"""Which precision? Train with each, with several seeds, and say what is faster, smaller, and as good.

    python scripts/compare.py -cfg configs/vit_digits.yaml -modes fp32,bf16 -seeds 3
    python scripts/compare.py -cfg mine.yaml -modes fp32,fp16,bf16,O2-bf16 -seeds 3 -output runs/compared -ngpus 4

The other modes are compared with the first one. Every run is a process of its own, in turns there and back, in a folder
of its own: DIR/bf16-0 is bf16 with seed 0. What is finished is not trained again, and what was interrupted goes on, by
the same command; more modes and seeds may be named then. At the end: a verdict, the table behind it, all figures in
DIR/compare.json, and DIR/report.html. docs/compare.md tells how the verdict is reached.

Modes: fp32 (or off), tf32, fp16, bf16, fp8, auto; O2-bf16, O2-fp16, NAIVE-bf16, NAIVE-fp16, O3-bf16, O3-fp16, apex; and
every other value of -amp, as what it makes on this device. O2:bf16 is O2-bf16.

Exit codes: 0 done, 1 a run failed (the others are compared), 2 anything wrong that can be found before training,
130 interrupted.

The flags and settings of main_single_gpu.py hold (with -ngpus those of main_multi_gpu.py;
-ngpus -1: all visible GPUs).
"""

from __future__ import annotations

import shlex
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tools.common.command_line import Tool, run_tool
from utils.cli import Flag
from utils.errors import EXIT_DONE, EXIT_FAILED, EXIT_INTERRUPTED, EXIT_STOPPED, UserError
from utils.files import kind_of_path
from utils.log import log
from utils.run_folder import git_state, write_json

if TYPE_CHECKING:
    from tools.compare.plan import Plan

OWN = (
    Flag("modes", "what to compare (default fp32,auto)", "A,B", ("MODES",)),
    Flag("seeds", "how many, or which: 3 or 0,1,5 (default 3)", "N", ("SEEDS",)),
    Flag("output", "folder of all the runs (default output/compare)", "DIR", ("OUT",), old=("out",)),
)
TOOL = Tool("compare.py", __doc__, OWN)


def main(argv: list[str]) -> int:
    return run_tool(_compare, argv)


def _compare(argv: list[str]) -> int:
    line = TOOL.read(argv)
    out = Path(line.own["OUT"][0] if "OUT" in line.own else "output/compare").expanduser()
    if (kind := kind_of_path(out)) not in (None, "a folder"):
        raise UserError(f"-output {out}: this is {kind}; name a folder.")

    from tools.compare.plan import plan
    from tools.compare.train import Ended, train_all

    asked = plan(line, out)
    for remark in asked.remarks:
        log.info("%s", remark)
    log.info(
        "%d runs: %s, each with %s; in %s",
        len(asked.runs),
        ", ".join(mode.name for mode in asked.modes),
        f"seed {asked.seeds[0]}" if len(asked.seeds) == 1 else f"the seeds {', '.join(map(str, asked.seeds))}",
        out,
    )
    try:
        failed = train_all(asked, lambda failed: _write_down(asked, failed, out))
        _report(_write_down(asked, failed, out), out)
    except (KeyboardInterrupt, Ended) as error:
        log.warning("interrupted; all that was trained is in %s, and the same command goes on from there", out)
        return EXIT_STOPPED if isinstance(error, Ended) else EXIT_INTERRUPTED
    return EXIT_FAILED if failed else EXIT_DONE


def _write_down(asked: Plan, failed: dict[str, str], out: Path) -> dict[str, Any]:
    """compare.json: all there is so far."""
    from tools.compare.figures import figures_of, is_finished
    from tools.compare.plan import in_words
    from tools.compare.verdict import by_mode, judge, troubles

    modes = [mode.name for mode in asked.modes]
    rows = [
        {"mode": run.mode, "seed": run.seed, "folder": run.folder.name, **figures_of(run.folder)}
        for run in asked.runs
        if is_finished(run.folder)
    ]
    found = by_mode(rows)
    why = {
        mode: [failed[run.folder.name] for run in asked.runs if run.mode == mode and run.folder.name in failed]
        for mode in modes
    }
    about = {
        "compared": modes,
        "seeds": list(asked.seeds),
        "date": time.strftime("%Y-%m-%d"),
        "command": shlex.join(["python", "scripts/compare.py", *sys.argv[1:]]),
        "device": next((row["device"] for row in rows), asked.device),
        "versions": next((row["versions"] for row in rows), {}),
        "git": git_state(),
        "settings": in_words(asked.runs[0].config),
        "runs": [{key: value for key, value in row.items() if key not in ("device", "versions")} for row in rows],
        "failed": failed,
        "verdicts": judge(found, modes),
        "troubles": troubles(found, why, modes),
    }
    try:
        write_json(out / "compare.json", about)
    except OSError as error:  # it is written anew after the next run, and the runs say all of it again
        log.warning("%s: cannot be written (%s).", out / "compare.json", error.strerror)
        return {**about, "unwritten": True}
    return about


def _report(about: dict[str, Any], out: Path) -> None:
    from tools.common.tables import in_columns
    from tools.compare.table import notes, sentences, table
    from tools.compare.verdict import by_mode

    page = _page(about, sentences(about), out)
    print("\n".join(["", *in_columns(table(by_mode(about["runs"]), about["compared"])), ""]))
    for note in notes(about):
        print(f"  {note}")
    print("\n".join(["", *sentences(about), ""]))
    if "unwritten" not in about:
        log.info("all figures: %s", out / "compare.json")
    if page is not None:
        log.info("the page: %s", page)


def _page(about: dict[str, Any], verdict: list[str], out: Path) -> Path | None:
    """The runs side by side; what goes wrong with it is not to cost the verdict."""
    if not about["runs"]:
        return None
    from tools.common.report_page.page import write_report

    rows = sorted(about["runs"], key=lambda row: (about["compared"].index(row["mode"]), row["seed"]))
    try:
        return write_report([out / row["folder"] for row in rows], out / "report.html", verdict="\n".join(verdict))
    except UserError as error:
        log.warning("%s", error)
        return None
