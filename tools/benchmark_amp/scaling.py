"""`scaling`: how time and memory grow with batch size, image size, model and number of processes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from tools.benchmark_amp.results import AGAIN
from tools.benchmark_amp.scaling_report import NO_EXCHANGE, charts, processes_name, sections
from tools.benchmark_amp.settings import MODEL, ON_CPU, ON_THE_DEVICE, changed, set_up, synthetic
from tools.benchmark_amp.table import ROUNDS, Contender, Plan, Table
from tools.common.command_line import ToolLine, some_of, whole_numbers
from tools.common.settings import non_defaults
from utils.config import Config
from utils.errors import UserError
from utils.flags import Flag, whole
from utils.machine.cpus import cores

if TYPE_CHECKING:
    import torch

ABOUT = """Speed and memory against batch size, image size, model size and number of processes, with a prediction.

    python scripts/benchmark_amp.py scaling -amp
    python scripts/benchmark_amp.py scaling -axes batch,model -batches 32,64,128,256 -models vit_small_patch16_224

Each axis varies one size and keeps the others at the base size. The prediction is the time that the counted operations
of the model take at the FLOP/s of the base size. A size that is faster than predicted uses the device better than the
base size does; a slower one is limited by something other than arithmetic. On the axis of processes, each process
trains the base size, so the prediction is the time of one process. `exchange` is the fraction of the time that the
all-reduce of gradients takes. -threads is per process."""
AXES = ("batch", "image", "model", "processes")
FLAGS = (
    MODEL,
    Flag("axes", f"axes to measure: {','.join(AXES)}", "A,B", kind=some_of(*AXES), default_text="all"),
    Flag("batches", "batch sizes", "A,B", kind=whole_numbers(1), default_text="1/4 to 4 times DATA.BATCH_SIZE"),
    Flag("images", "image sizes", "A,B", kind=whole_numbers(1), default_text="1/2 to 2 times DATA.IMAGE_SIZE"),
    Flag("models", "models", "A,B", default_text="ViT Ti to H; on a CPU Ti and S"),
    Flag(
        "processes",
        "numbers of processes",
        "A,B",
        kind=whole_numbers(1),
        default_text="1 and all GPUs; on a CPU 1,2",
    ),
    Flag("iters", "iterations per measurement", "N", kind=whole(1), default_text="20; on a CPU 5"),
    ROUNDS,
)
VITS = (
    "vit_tiny_patch16_224",
    "vit_small_patch16_224",
    "vit_base_patch16_224",
    "vit_large_patch16_224",
    "vit_huge_patch14_224",
)
SMALL_VITS = VITS[:2]
SMALL = ON_CPU | {"DATA.IMAGE_SIZE": 96, "DATA.BATCH_SIZE": 4}
PATCH = 16
"""Default image sizes are multiples of it."""


@dataclass(frozen=True)
class Point:
    """One size to train."""

    model: str
    image: int
    batch: int

    @property
    def name(self) -> str:
        return f"{self.model}, {self.image} pixels, batch {self.batch}"

    def config(self, base: Config) -> Config:
        from models.sizes import SIZE_KEYS

        sizes = {} if self.model == base.MODEL.NAME else dict.fromkeys(SIZE_KEYS)
        config = changed(base, "MODEL", NAME=self.model, **sizes)
        return changed(config, "DATA", IMAGE_SIZE=self.image, BATCH_SIZE=self.batch)


def plan(line: ToolLine) -> Plan:
    setup, axes = set_up(line, SMALL, on_gpu={"DATA.BATCH_SIZE": 128}), line.asked.axes or AXES
    config, updates = setup.config, line.asked.iters or (5 if setup.on_cpu else 20)
    base = Point(config.MODEL.NAME, config.DATA.IMAGE_SIZE, config.DATA.BATCH_SIZE)
    points = {axis: _points(line, axis, base, setup.on_cpu) for axis in axes if axis != "processes"}
    work, left_out = _work({base, *(point for axis in points.values() for point in axis)}, config)
    if base.name in left_out:
        raise UserError(left_out[base.name])
    contenders = _contenders(base, points, work, config, updates)
    numbers = _numbers_of_processes(line, setup.device) if "processes" in axes else []
    contenders += _processes(numbers, config, updates)
    measured = {axis: [point.name for point in row if point.name in work] for axis, row in points.items()}
    settings = {"iterations": updates, "base": base.name, "axes": measured, "processes": numbers, "work": work}
    settings |= non_defaults(config)
    return Plan(contenders, line.asked.rounds, settings, setup.machine(), ON_THE_DEVICE, left_out, setup.remarks)


def _points(line: ToolLine, axis: str, base: Point, on_cpu: bool) -> list[Point]:
    """Sizes along an axis: the user's, or some around the base size."""
    if axis == "batch":
        batches = line.asked.batches or [
            max(1, base.batch // 4),
            max(1, base.batch // 2),
            *(base.batch * n for n in (1, 2, 4)),
        ]
        return [replace(base, batch=batch) for batch in sorted(set(batches))]
    if axis == "image":
        images = [max(PATCH, round(base.image * scale / PATCH) * PATCH) for scale in (0.5, 0.75, 1, 1.5, 2)]
        return [replace(base, image=image) for image in line.asked.images or sorted(set(images))]
    models = line.asked.models.split(",") if line.asked.models else SMALL_VITS if on_cpu else VITS
    return [replace(base, model=name) for name in models]


def _numbers_of_processes(line: ToolLine, device: torch.device) -> list[int]:
    import torch

    on_gpu = device.type == "cuda"
    most = torch.cuda.device_count() if on_gpu else 2
    numbers = line.asked.processes or sorted({1, most})
    if on_gpu and numbers[-1] > most:
        raise UserError(f"-processes {numbers[-1]}: each process needs a GPU, and {most} are visible.")
    return list(numbers)


def _work(points: set[Point], config: Config) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """Sizes and GFLOP per image of each point, by its name; and why some points cannot be built."""
    from engine.measure.mfu import training_flops
    from models import build_without_weights

    work: dict[str, dict[str, Any]] = {}
    left_out: dict[str, str] = {}
    counted: dict[tuple[str, int], float | None] = {}
    for point in points:
        own, size = point.config(config), (point.model, point.image)
        channels = own.DATA.IMAGE_CHANNELS
        try:
            if size not in counted:
                model = build_without_weights(own.MODEL, point.image, channels)
                counted[size] = training_flops(model, channels, point.image)
        except UserError as error:
            left_out[point.name] = str(error).splitlines()[-1].strip()
            continue
        gflop = (counted[size] or 0.0) / 1e9
        work[point.name] = {"model": point.model, "image": point.image, "batch": point.batch, "gflop_per_image": gflop}
    return work, left_out


def _contenders(
    base: Point, points: dict[str, list[Point]], work: dict[str, dict[str, Any]], config: Config, updates: int
) -> list[Contender]:
    from tools.benchmark_amp.training import Job, one_turn

    def contender(point: Point, suffix: str = "") -> Contender:
        job = Job(synthetic(point.config(config), updates), updates)
        return Contender(point.name + suffix, partial(one_turn, job))

    if not points:
        return []
    others = dict.fromkeys(p for row in points.values() for p in row if p != base and p.name in work)
    return [contender(base), *map(contender, others), contender(base, AGAIN)]


def _processes(numbers: list[int], config: Config, updates: int) -> list[Contender]:
    """Processes that train together, each with the threads and the batch size of one alone."""
    from tools.benchmark_amp.training import Job, one_turn

    if not numbers:
        return []
    threads = config.THREADS or max(1, cores() // numbers[-1])
    each = config.model_copy(update={"THREADS": threads})
    contenders = []
    for number in numbers:
        job, name = Job(synthetic(each, updates * number), updates), processes_name(number)
        contenders.append(Contender(name, partial(one_turn, job, number)))
        if number > 1:
            alone = partial(one_turn, replace(job, exchange=False), number)
            contenders.append(Contender(name + NO_EXCHANGE, alone))
    return [*contenders, replace(contenders[0], name=contenders[0].name + AGAIN)]


TABLE = Table("scaling", ABOUT, FLAGS, plan, sections, charts)
