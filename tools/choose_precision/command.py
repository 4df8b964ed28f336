"""Which precision should I train in? Measured on your own model and data, not believed.

    python scripts/choose_precision.py -cfg configs/vit_digits.yaml
    python scripts/choose_precision.py -cfg configs/vit_base_patch16_224.yaml -data_path /data/imagenet \\
        -batch_size 64 -updates 300 -budget_min 9 -modes fp16,bf16,O2-bf16

It trains a few hundred updates in fp32, from three seeds to see what is chance, and in every other precision that
makes sense on this device, each in a process of its own. It compares speed, memory and loss curve, counts skipped
updates, and looks at every layer's gradients. It ends with one sentence and the flags to use, and writes
choose_precision.json and choose_precision.png into its folder (-output DIR; otherwise one is made in SAVE).

All flags and settings of main_single_gpu.py hold, save that AMP.ENABLED, AMP.DTYPE, AMP.LEVEL and AMP.TF32 are what is
compared.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.common.command_line import OVERWRITE, Tool, ToolLine, about_one_device, check_one_training, run_tool
from utils.cli import Flag
from utils.config import Loaded
from utils.distributed.world import ALONE
from utils.errors import EXIT_DONE, UserError
from utils.log import log

OWN = (
    Flag("updates", "updates of each measurement (default 300)", "N", ("UPDATES",)),
    Flag("budget_min", "minutes in all; what does not fit in is cut short (default 10)", "M", ("BUDGET_MIN",)),
    Flag(
        "modes", "what to compare with fp32: tf32 fp16 bf16 O2-fp16 ... (default: what makes sense)", "A,B", ("MODES",)
    ),
    OVERWRITE,
)
NAME, FORMER_NAME = "choose_precision", "doctor"
TOOL = Tool(f"{NAME}.py", __doc__, OWN)
FEWEST_UPDATES = 5


@dataclass(frozen=True)
class Wishes:
    updates: int
    seconds: float
    modes: str | None


def main(argv: list[str], name: str = NAME) -> int:
    """`name`: which the user called, and which the report and its folder bear."""
    return run_tool(lambda words: _examine(words, name), argv)


def _examine(argv: list[str], name: str) -> int:
    if name == FORMER_NAME:
        log.warning("scripts/%s.py is now scripts/%s.py; under its former name it does the same", name, NAME)
    line = TOOL.read(argv)
    wishes = _wishes(line)
    loaded = line.load()
    _check(loaded, name, bool(line.asked.overwrite))

    # Only now, with everything known to be right: importing torch takes seconds.
    from engine.machine.device import pick_device
    from engine.preflight import check
    from tools.choose_precision.examination import Examination
    from tools.common.precisions import plan, read_modes
    from tools.common.processes import quieten

    quieten()
    check(loaded.config)
    device = pick_device(loaded.config.DEVICE, ALONE)
    asked_for = read_modes(wishes.modes, loaded.config.AMP, device) if wishes.modes is not None else None
    for note in [*loaded.notes, *_without_effect(loaded)]:
        log.info(note)
    planned = plan(loaded.config, device, asked_for)
    Examination(loaded.config, device, planned, wishes.updates, wishes.seconds, name).run()
    return EXIT_DONE


def _wishes(line: ToolLine) -> Wishes:
    updates = _number(line, "UPDATES", 300, int)
    minutes = _number(line, "BUDGET_MIN", 10.0, float)
    if updates < FEWEST_UPDATES:
        raise UserError(f"-updates {updates}: too few to say anything; {FEWEST_UPDATES} or more, better hundreds.")
    if not 0 < minutes < float("inf"):
        raise UserError(f"-budget_min {minutes:g}: minutes are a number above 0, such as 5.")
    modes = line.own.get("MODES")
    return Wishes(updates, 60 * minutes, None if modes is None else modes[0])


def _without_effect(loaded: Loaded) -> list[str]:
    """Settings of the user that this tool does not follow."""
    compared = [k for k in ("ENABLED", "DTYPE", "LEVEL", "TF32") if loaded.sources[f"AMP.{k}"] != "default"]
    notes = [f"AMP.{key} ({loaded.sources[f'AMP.{key}']}): this is what is compared here" for key in compared]
    if loaded.config.AMP.AUTO_FP32:
        notes.append("AMP.AUTO_FP32: no module is moved to fp32 here, so that every precision is seen as it is")
    return notes + about_one_device(loaded)


def _number(line: ToolLine, key: str, default: Any, kind: type) -> Any:
    text, flag = line.own.get(key, (default, ""))
    try:
        return kind(text)
    except ValueError:
        raise UserError(f"{flag} {text}: takes a {'whole ' * (kind is int)}number, such as {default:g}.") from None


def _check(loaded: Loaded, name: str, overwrite: bool) -> None:
    config = loaded.config
    check_one_training(loaded, f"{NAME}.py")
    if not overwrite and config.OUTPUT is not None and (Path(config.OUTPUT) / f"{name}.json").exists():
        raise UserError(
            f"-output {config.OUTPUT}: {name}.json is there already; name another folder, or give -overwrite."
        )
