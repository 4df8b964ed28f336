"""Which precision should I train in? Measured on your own model and data.

    python scripts/choose_precision.py -cfg configs/vit_digits.yaml
    python scripts/choose_precision.py -cfg configs/vit_base_patch16_224.yaml -data_path /data/imagenet \\
        -batch_size 64 -updates 300 -budget_min 9 -modes fp16,bf16,O2-bf16

It trains a few hundred updates in fp32, with three seeds to measure the noise, and in every other precision that is
useful on this device, each in a process of its own. It compares speed, memory and loss curve, counts skipped updates,
and examines the gradients of every layer. It ends with a recommendation and the flags for it, and writes
choose_precision.json and choose_precision.png into -output DIR, or into a new folder in SAVE.

The flags and settings of main_single_gpu.py are accepted, except -eval and -resume. -amp, AMP.ENABLED, AMP.DTYPE,
AMP.LEVEL, AMP.TF32, AMP.AUTO_FP32 and -ngpus have no effect: the tool compares precisions on one device.
"""

from __future__ import annotations

from pathlib import Path

from tools.common.command_line import (
    OVERWRITE,
    Tool,
    about_one_device,
    above_zero,
    check_one_training,
    run_tool,
)
from utils.config import Loaded
from utils.distributed.world import ALONE
from utils.errors import EXIT_DONE, UserError
from utils.flags import Flag, whole
from utils.log import log

FEWEST_UPDATES = 5
OWN = (
    Flag(
        "updates", "updates per measurement; use at least a few hundred", "N", default=300, kind=whole(FEWEST_UPDATES)
    ),
    Flag("budget_min", "time limit in minutes; measurements are cut short to fit", "M", default=10, kind=above_zero),
    Flag(
        "modes",
        "precisions to compare with fp32: tf32,fp16,bf16,O2-fp16,...",
        "A,B",
        default_text="all that are useful on this device",
    ),
    OVERWRITE,
)
NAME = "choose_precision"
TOOL = Tool(f"{NAME}.py", __doc__, OWN)


def main(argv: list[str]) -> int:
    return run_tool(_choose, argv)


def _choose(argv: list[str]) -> int:
    line = TOOL.read(argv)
    asked, loaded = line.asked, line.load()
    _check(loaded, bool(asked.overwrite))

    # Imported after all checks: importing torch takes seconds.
    from engine.machine.device import pick_device
    from engine.preflight import check
    from tools.choose_precision.examination import Examination
    from tools.common.precisions import plan, read_modes
    from tools.common.processes import silence_torchao

    silence_torchao()
    check(loaded.config, loaded.sources)
    device = pick_device(loaded.config.DEVICE, ALONE)
    modes = read_modes(asked.modes, loaded.config.AMP, device) if asked.modes is not None else None
    for note in [*loaded.notes, *_without_effect(loaded)]:
        log.info(note)
    planned = plan(loaded.config, device, modes)
    Examination(loaded.config, device, planned, asked.updates, 60 * asked.budget_min, NAME).run()
    return EXIT_DONE


def _without_effect(loaded: Loaded) -> list[str]:
    """Notes on the user's settings that this tool ignores."""
    compared = [k for k in ("ENABLED", "DTYPE", "LEVEL", "TF32") if loaded.sources[f"AMP.{k}"] != "default"]
    notes = [
        f"AMP.{key} ({loaded.sources[f'AMP.{key}']}) has no effect: this tool compares its values" for key in compared
    ]
    if loaded.config.AMP.AUTO_FP32:
        notes.append(
            "AMP.AUTO_FP32 has no effect: no module is moved to fp32, so that each precision is measured unchanged"
        )
    return notes + about_one_device(loaded)


def _check(loaded: Loaded, overwrite: bool) -> None:
    config = loaded.config
    check_one_training(loaded, f"{NAME}.py")
    if not overwrite and config.OUTPUT is not None and (Path(config.OUTPUT) / f"{NAME}.json").exists():
        raise UserError(f"-output {config.OUTPUT}: {NAME}.json exists; name another folder, or give -overwrite.")
