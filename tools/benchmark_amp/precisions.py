"""`precisions`: memory and speed of every precision that the device has, without and with a real input pipeline."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from tools.benchmark_amp.ceiling import ceiling, ceiling_line, of_peak
from tools.benchmark_amp.frame import (
    AGAIN,
    Chart,
    Contender,
    Figures,
    Found,
    Plan,
    Section,
    Table,
    choices_lines,
    control_line,
    iteration_line,
    middle,
    shown,
    shown_ratio,
    subject,
    times_as_much,
)
from tools.benchmark_amp.settings import MODEL, changed, settings_of, synthetic
from tools.common.command_line import ToolLine
from tools.common.settings import told
from utils.cli import Flag
from utils.config import Config
from utils.errors import UserError

if TYPE_CHECKING:
    import torch

    from tools.common.precisions import Mode

ABOUT = """Memory, iterations/s, images/s, speed-up of each precision: images made on the device, and read from files.

    python scripts/benchmark_amp.py precisions -model vit_base_patch16_224 -batch_size 128
    python scripts/benchmark_amp.py precisions -dataset imagefolder -data_path /data/flowers -modes bf16,O2-bf16

Every turn is a process of its own, so that its memory is its own. Files are JPEGs that it makes, once, of 500 x 375;
-dataset and -data_path name others."""
FLAGS = (
    MODEL,
    Flag("iters", "iterations of a turn (default 50; on a CPU 5)", "N", ("ITERS",)),
    Flag("rounds", "turns of each (default 3)", "N", ("ROUNDS",)),
    Flag(
        "modes",
        "beside fp32, values of -amp: tf32 fp16 bf16 O2-fp16 apex ... (default: those that this device has)",
        "A,B",
        ("MODES",),
    ),
    Flag("no_files", "only on images made on the device", "", ("NO_FILES",)),
    Flag("made", "JPEGs to make (default 8000; on a CPU 200)", "N", ("MADE",)),
)
REFERENCE = "fp32"
SYNTHETIC, FILES = "synthetic", "files"


def plan(line: ToolLine) -> Plan:
    rounds = line.whole("ROUNDS", 3)
    loaded, device, remarks = settings_of(line)
    small = device.type == "cpu"
    updates, made = line.whole("ITERS", 5 if small else 50), line.whole("MADE", 200 if small else 8000)
    config = changed(loaded.config, "AMP", ENABLED=False)

    from tools.benchmark_amp.training import device_in_words, gpu_of
    from tools.common.precisions import MODES, read_modes
    from tools.common.processes import quieten

    quieten()
    asked = read_modes(line.own["MODES"][0], config.AMP, device) if "MODES" in line.own else None
    left_out: dict[str, str] = {}
    for mode in asked if asked is not None else MODES[1:]:
        reason = _why_not(mode, config, device, asked is not None)
        if reason and asked is not None:
            raise UserError(f"-modes {mode.name}: {reason}")
        if reason:
            left_out[mode.name] = reason
    taken = [MODES[0], *(mode for mode in (asked or MODES[1:]) if mode.name not in left_out)]
    with_files = "NO_FILES" not in line.own
    if with_files and loaded.sources["DATA.DATASET"] == "default" and config.DATA.DATA_PATH is None:
        from tools.common.made_images import on_made_images

        config = on_made_images(config, made, "small")
    contenders = _contenders(taken, config, updates, with_files)
    wishes = {"iterations": updates, "made": made if with_files else 0, **told(config)}
    words, gpu = device_in_words(config, device), gpu_of(device)
    most = ceiling(config, device, (mode.amp(config.AMP) for mode in taken))
    return Plan(contenders, rounds, wishes, words, gpu, left_out, remarks, most)


def _why_not(mode: Mode, config: Config, device: torch.device, asked: bool) -> str | None:
    from tools.common.precisions import cannot, is_emulated, lacks_arithmetic

    reason = cannot(mode, config, device)
    if reason or asked:
        return reason
    if lacks_arithmetic(mode, device):
        return "this CPU has no fp16 arithmetic, and takes a detour for every product (-modes measures it all the same)"
    if is_emulated(mode, device):
        return "emulated here, so its speed would say nothing (-modes measures it all the same)"
    return "keeps no fp32 masters (-modes measures it all the same)" if mode.level == "O3" else None


def _contenders(modes: list[Mode], files: Config, updates: int, with_files: bool) -> list[Contender]:
    from tools.benchmark_amp.training import Job, one_turn

    made = synthetic(files, updates)

    def turn(mode: Mode, config: Config) -> Callable[[], Figures]:
        return partial(one_turn, Job(config.model_copy(update={"AMP": mode.amp(config.AMP)}), updates))

    contenders = [Contender(_name(mode.name, SYNTHETIC), turn(mode, made)) for mode in modes]
    contenders.append(Contender(_name(REFERENCE, SYNTHETIC) + AGAIN, turn(modes[0], made)))
    if not with_files:
        return contenders
    return contenders + [Contender(_name(mode.name, FILES), turn(mode, files)) for mode in modes]


def _name(mode: str, source: str) -> str:
    return f"{mode}, {source}"


def _modes(found: Found) -> list[str]:
    return [name.partition(", ")[0] for name in found["turns"] if name.endswith(SYNTHETIC)]


def sections(found: Found) -> list[Section]:
    first = ["mode", "memory (GB)", "to fp32", "iterations/s", "images/s", "of peak", "speed-up"]
    with_files = any(name.endswith(FILES) for name in found["turns"])
    rows = [[*first, *(("from files", "speed-up", "waited") if with_files else ())]]
    for mode in _modes(found):
        made, files = _name(mode, SYNTHETIC), _name(mode, FILES)
        waited = middle(found, files, "data_wait_percent")
        from_files = [
            shown(middle(found, files, "images_per_second")),
            shown_ratio(times_as_much(found, files, _name(REFERENCE, FILES), "images_per_second")),
            "-" if waited is None else f"{waited:.0f} %",
        ]
        rows.append(
            [
                mode,
                shown(middle(found, made, "peak_memory_gb")),
                _percent(_to_fp32(found, mode, SYNTHETIC, "peak_memory_gb")),
                shown(middle(found, made, "iterations_per_second")),
                shown(middle(found, made, "images_per_second")),
                of_peak(found, made),
                shown_ratio(times_as_much(found, made, _name(REFERENCE, SYNTHETIC), "images_per_second")),
                *(from_files if with_files else ()),
            ]
        )
    notes = [
        ceiling_line(found),
        *choices_lines(found, (_name(mode, SYNTHETIC) for mode in _modes(found))),
        control_line(found, _name(REFERENCE, SYNTHETIC), "images_per_second"),
        iteration_line(found),
    ]
    if with_files:
        notes.append(
            "from files: images/s of JPEGs that are read, decoded and augmented; waited: how much the model waited"
        )
    if found["device"].startswith("cpu"):
        notes.append("memory: the most that the whole process took, with Python and its libraries")
    return [Section(f"Precisions, {subject(found)}, {found['settings']['iterations']} iterations a turn", rows, notes)]


def _to_fp32(found: Found, mode: str, source: str, key: str) -> float | None:
    mine, base = (middle(found, _name(name, source), key) for name in (mode, REFERENCE))
    return mine / base if mine is not None and base else None


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.0f} %"


def charts(found: Found) -> list[Chart]:
    def bars(key: str, source: str) -> dict[str, float]:
        return {mode: value for mode in _modes(found) if (value := middle(found, _name(mode, source), key)) is not None}

    return [
        Chart("peak memory", "GB", bars=bars("peak_memory_gb", SYNTHETIC)),
        Chart("images made on the device", "images/s", bars=bars("images_per_second", SYNTHETIC)),
        *([Chart("images from files", "images/s", bars=files)] if (files := bars("images_per_second", FILES)) else []),
    ]


TABLE = Table("precisions", ABOUT, FLAGS, plan, sections, charts)
