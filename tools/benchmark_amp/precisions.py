"""`precisions`: memory and speed of every precision of the device, on synthetic images and on image files."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from tools.benchmark_amp.ceiling import of_peak, peak_line
from tools.benchmark_amp.results import AGAIN, Results, percent, shown
from tools.benchmark_amp.settings import MODEL, ON_THE_DEVICE, Setup, changed, images_of, set_up, synthetic, users_data
from tools.benchmark_amp.table import ROUNDS, Contender, Plan, Table
from tools.common.command_line import ToolLine
from tools.common.results.section import Chart, Section
from tools.common.settings import non_defaults
from utils.config import Config
from utils.errors import UserError
from utils.flags import Flag, whole

if TYPE_CHECKING:
    import torch

    from tools.common.precisions import Mode

ABOUT = """Memory, iterations/s, images/s and speed-up of each precision, on synthetic images and on image files.

    python scripts/benchmark_amp.py precisions -model vit_base_patch16_224 -batch_size 128
    python scripts/benchmark_amp.py precisions -dataset imagefolder -data_path /data/flowers -modes bf16,O2-bf16

Every measurement runs in a process of its own, so that its peak memory is known. Synthetic images are generated on the
device. The image files are JPEGs of about 500 x 375 that the tool generates once, unless -dataset or -data_path names
others."""
FLAGS = (
    MODEL,
    Flag("iters", "iterations per measurement", "N", kind=whole(1), default_text="50; on a CPU 5"),
    ROUNDS,
    Flag(
        "modes",
        "precisions to compare with fp32: values of -amp such as tf32,bf16,O2-fp16",
        "A,B",
        default_text="all that are useful on this device",
    ),
    Flag("no_files", "measure synthetic images only"),
    Flag("made", "number of JPEGs to generate", "N", kind=whole(1), default_text="8000; on a CPU 200"),
)
REFERENCE = "fp32"
SYNTHETIC, FILES = "synthetic", "files"


def plan(line: ToolLine) -> Plan:
    setup = set_up(line, reads_data=True)
    updates, made = line.asked.iters or (5 if setup.on_cpu else 50), line.asked.made or (200 if setup.on_cpu else 8000)
    with_files = not line.asked.no_files
    given = users_data(setup) if with_files else None
    config = changed(given or setup.config, "AMP", ENABLED=False)
    modes, left_out = _modes(line.asked.modes, config, setup)
    images = ON_THE_DEVICE
    if with_files:
        images += f"; with files, {images_of(config) if given else 'JPEGs made by this tool'}"
    if with_files and given is None:
        from tools.common.made_images import on_made_images

        config = on_made_images(config, made, "small")
    contenders = _contenders(modes, config, updates, with_files)
    settings = {"iterations": updates, "made": made if with_files else 0, **non_defaults(config)}
    machine = setup.machine(mode.amp(config.AMP) for mode in modes)
    return Plan(contenders, line.asked.rounds, settings, machine, images, left_out, setup.remarks)


def _modes(words: str | None, config: Config, setup: Setup) -> tuple[list[Mode], dict[str, str]]:
    """Precisions to measure, fp32 first, and why the others of -modes' default are left out."""
    from tools.common.precisions import MODES, cannot, read_modes
    from tools.common.processes import silence_torchao

    silence_torchao()
    if words is None:
        left_out = {mode.name: why for mode in MODES[1:] if (why := _why_not(mode, config, setup.device))}
        return [mode for mode in MODES if mode.name not in left_out], left_out
    modes = read_modes(words, config.AMP, setup.device)
    for mode in modes:
        if why := cannot(mode, config, setup.device):
            raise UserError(f"-modes {mode.name}: {why}")
    return [MODES[0], *modes], {}


def _why_not(mode: Mode, config: Config, device: torch.device) -> str | None:
    """Why a precision is not measured by default; None if it is."""
    from tools.common.precisions import cannot, is_emulated, lacks_arithmetic

    anyway = "(list it in -modes to measure it anyway)"
    if why := cannot(mode, config, device):
        return why
    if lacks_arithmetic(mode, device):
        return f"this CPU has no fp16 arithmetic and emulates every product {anyway}"
    if is_emulated(mode, device):
        return f"emulated on this device, so its speed is meaningless {anyway}"
    return f"keeps no fp32 master weights {anyway}" if mode.level == "O3" else None


def _contenders(modes: list[Mode], files: Config, updates: int, with_files: bool) -> list[Contender]:
    from tools.benchmark_amp.training import Job, one_turn

    def contender(mode: Mode, source: str, suffix: str = "") -> Contender:
        config = files if source == FILES else synthetic(files, updates)
        job = Job(config.model_copy(update={"AMP": mode.amp(config.AMP)}), updates)
        return Contender(_name(mode.name, source) + suffix, partial(one_turn, job))

    contenders = [*(contender(mode, SYNTHETIC) for mode in modes), contender(modes[0], SYNTHETIC, AGAIN)]
    return contenders + [contender(mode, FILES) for mode in modes] if with_files else contenders


def _name(mode: str, source: str) -> str:
    return f"{mode}, {source}"


def _measured(results: Results) -> list[str]:
    return [name.partition(", ")[0] for name in results.turns if name.endswith(SYNTHETIC)]


def sections(results: Results) -> list[Section]:
    heading = ["mode", "memory (GB)", "to fp32", "iterations/s", "images/s", "of peak", "speed-up"]
    with_files = any(name.endswith(FILES) for name in results.turns)
    rows = [[*heading, *(("from files", "speed-up", "waited") if with_files else ())]]
    base, modes = _name(REFERENCE, SYNTHETIC), _measured(results)
    for mode in modes:
        name = _name(mode, SYNTHETIC)
        memory, of_base = (results.median(each, "peak_memory_gb") for each in (name, base))
        rows.append(
            [
                mode,
                shown(memory),
                percent(memory / of_base if memory is not None and of_base else None),
                shown(results.median(name, "iterations_per_second")),
                shown(results.median(name, "images_per_second")),
                of_peak(results, name),
                shown(results.ratio(name, base, "images_per_second")),
                *(_from_files(results, mode) if with_files else ()),
            ]
        )
    notes = [
        peak_line(results),
        *results.choices_lines({_name(mode, SYNTHETIC): mode for mode in modes}),
        results.control_line(base, "images_per_second", REFERENCE),
        results.iteration_line(),
    ]
    if with_files:
        notes += [
            "from files: images/s with image files that are read, decoded and augmented, followed by the speed-up with "
            "them; waited: fraction of the time that training from these files spent waiting for data",
            "everything else: with synthetic images, made on the device",
        ]
    else:
        notes.append("images: synthetic, made on the device")
    if results["device"].startswith("cpu"):
        notes.append("memory: peak of the whole process, Python and libraries included")
    title = f"Precisions, {results.subject()}, {results.settings['iterations']} iterations per measurement"
    return [Section(title, rows, notes)]


def _from_files(results: Results, mode: str) -> list[str]:
    name, waited = _name(mode, FILES), results.median(_name(mode, FILES), "data_wait_percent")
    return [
        shown(results.median(name, "images_per_second")),
        shown(results.ratio(name, _name(REFERENCE, FILES), "images_per_second")),
        percent(None if waited is None else waited / 100),
    ]


def charts(results: Results) -> list[Chart]:
    def bars(key: str, source: str) -> dict[str, float]:
        values = {mode: results.median(_name(mode, source), key) for mode in _measured(results)}
        return {mode: value for mode, value in values.items() if value is not None}

    files = bars("images_per_second", FILES)
    return [
        Chart("peak memory", "GB", bars=bars("peak_memory_gb", SYNTHETIC)),
        Chart("synthetic images", "images/s", bars=bars("images_per_second", SYNTHETIC)),
        *([Chart("image files", "images/s", bars=files)] if files else []),
    ]


TABLE = Table("precisions", ABOUT, FLAGS, plan, sections, charts)
