"""`scaling`: how time and memory grow with the batch, the image, the model and the number of processes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from tools.benchmark_amp.frame import AGAIN, Contender, Plan, Table
from tools.benchmark_amp.scaling_report import WITHOUT, charts, group, sections
from tools.benchmark_amp.settings import MODEL, ON_CPU, changed, settings_of, synthetic
from tools.common.command_line import ToolLine
from tools.common.settings import told
from utils.cli import Flag
from utils.config import Config
from utils.cpus import cores
from utils.errors import UserError, nearest

if TYPE_CHECKING:
    import torch

ABOUT = """Speed and memory against batch size, image size, model size and processes, with the prediction beside.

    python scripts/benchmark_amp.py scaling -amp
    python scripts/benchmark_amp.py scaling -axes batch,model -batches 32,64,128,256 -models vit_small_patch16_224

One thing grows at a time, from a middle size that all share. Predicted is the time that the model's own operations
(counted) would take at the rate of that middle size: a line below it is work that fits the device better, a line above
it is a limit that is not arithmetic. Processes have the middle size each, so predicted is the time of one; `exchange`
is the share of the time that an update takes less without exchanging gradients. -threads is for each process."""
FLAGS = (
    MODEL,
    Flag("axes", "what grows: batch,image,model,processes (default: all)", "A,B", ("AXES",)),
    Flag("batches", "batch sizes (default: a fourth to four times DATA.BATCH_SIZE)", "A,B", ("BATCHES",)),
    Flag("images", "image sizes (default: half to twice DATA.IMAGE_SIZE)", "A,B", ("IMAGES",)),
    Flag("models", "models (default: ViT Ti to H; on a CPU Ti and S)", "A,B", ("MODELS",)),
    Flag("processes", "numbers of processes (default 1,2, or the GPUs there are)", "A,B", ("PROCESSES",)),
    Flag("iters", "iterations of a turn (default 20; on a CPU 5)", "N", ("ITERS",)),
    Flag("rounds", "turns of each (default 3)", "N", ("ROUNDS",)),
)
AXES = ("batch", "image", "model", "processes")
VITS = (
    "vit_tiny_patch16_224",
    "vit_small_patch16_224",
    "vit_base_patch16_224",
    "vit_large_patch16_224",
    "vit_huge_patch14_224",
)
SMALL_VITS = VITS[:2]


SMALL = ON_CPU | {"DATA.IMAGE_SIZE": 96, "DATA.BATCH_SIZE": 4}
STEP = 16
"""Image sizes are rounded to whole patches."""


@dataclass(frozen=True)
class Point:
    """One size of the work."""

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
    rounds, axes = line.whole("ROUNDS", 3), _axes(line)
    loaded, device, remarks = settings_of(line, SMALL, usual={"DATA.BATCH_SIZE": 128})
    updates = line.whole("ITERS", 5 if device.type == "cpu" else 20)
    config = loaded.config

    from tools.benchmark_amp.training import device_in_words, gpu_of

    base = Point(config.MODEL.NAME, config.DATA.IMAGE_SIZE, config.DATA.BATCH_SIZE)
    grown = {axis: _points(line, axis, base, device) for axis in axes if axis != "processes"}
    work, left_out = _work({base, *(point for points in grown.values() for point in points)}, config)
    if base.name in left_out:
        raise UserError(left_out[base.name])
    contenders = _contenders(base, grown, work, config, updates)
    numbers = _processes(line, device) if "processes" in axes else []
    contenders += _groups(numbers, config, updates)
    shown_axes = {axis: [p.name for p in points if p.name in work] for axis, points in grown.items()}
    wishes = {"iterations": updates, "base": base.name, "axes": shown_axes, "processes": numbers, "work": work}
    words = device_in_words(config, device)
    return Plan(contenders, rounds, wishes | told(config), words, gpu_of(device), left_out, remarks)


def _axes(line: ToolLine) -> list[str]:
    text, _ = line.own.get("AXES", (",".join(AXES), ""))
    for word in text.split(","):
        if word not in AXES:
            raise UserError(f"-axes {text}: there is no {word!r}.{nearest(word, AXES)} Known: {', '.join(AXES)}.")
    return text.split(",")


def _points(line: ToolLine, axis: str, base: Point, device: torch.device) -> list[Point]:
    """What the user wants to see, or sizes around the middle one."""
    if axis == "batch":
        usual = [max(1, base.batch // 4), max(1, base.batch // 2), base.batch, 2 * base.batch, 4 * base.batch]
        return [replace(base, batch=batch) for batch in _numbers(line, "BATCHES", usual)]
    if axis == "image":
        usual = [max(STEP, round(base.image * share / STEP) * STEP) for share in (0.5, 0.75, 1, 1.5, 2)]
        return [replace(base, image=image) for image in _numbers(line, "IMAGES", usual)]
    usual = SMALL_VITS if device.type == "cpu" else VITS
    text, _ = line.own.get("MODELS", (",".join(usual), ""))
    return [replace(base, model=name) for name in text.split(",")]


def _numbers(line: ToolLine, key: str, usual: list[int]) -> list[int]:
    text, flag = line.own.get(key, (",".join(map(str, usual)), ""))
    words = text.split(",")
    if not all(word.isdecimal() and int(word) for word in words):
        raise UserError(f"{flag} {text}: takes whole numbers above 0 with commas between them, such as 1,2,4.")
    return sorted({int(word) for word in words})


def _processes(line: ToolLine, device: torch.device) -> list[int]:
    import torch

    most = torch.cuda.device_count() if device.type == "cuda" else cores()
    numbers = _numbers(line, "PROCESSES", sorted({1, most} if device.type == "cuda" else {1, 2}))
    if device.type == "cuda" and numbers[-1] > most:
        raise UserError(f"-processes {numbers[-1]}: {most} GPU(s) are visible, one is needed for each.")
    return numbers


def _work(points: set[Point], config: Config) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """By a point's name: images, and GFLOP of an image. And why some cannot be."""
    from engine.measure.mfu import training_flops
    from models import build_without_weights

    work: dict[str, dict[str, Any]] = {}
    left_out: dict[str, str] = {}
    counted: dict[tuple[str, int], float | None] = {}
    for point in points:
        mine, size = point.config(config), (point.model, point.image)
        channels = mine.DATA.IMAGE_CHANNELS
        try:
            if size not in counted:
                model = build_without_weights(mine.MODEL, point.image, channels)
                counted[size] = training_flops(model, channels, point.image)
        except UserError as error:
            left_out[point.name] = str(error).splitlines()[-1].strip()
            continue
        gflop = (counted[size] or 0.0) / 1e9
        work[point.name] = {"model": point.model, "image": point.image, "batch": point.batch, "gflop_per_image": gflop}
    return work, left_out


def _contenders(
    base: Point, grown: dict[str, list[Point]], work: dict[str, dict[str, Any]], config: Config, updates: int
) -> list[Contender]:
    from tools.benchmark_amp.training import Job, one_turn

    def contender(point: Point, suffix: str = "") -> Contender:
        job = Job(synthetic(point.config(config), updates), updates)
        return Contender(point.name + suffix, partial(one_turn, job))

    if not grown:
        return []
    others = dict.fromkeys(p for points in grown.values() for p in points if p != base and p.name in work)
    return [contender(base), *map(contender, others), contender(base, AGAIN)]


def _groups(numbers: list[int], config: Config, updates: int) -> list[Contender]:
    """Processes that train together, each with as many threads and images as one alone has."""
    from tools.benchmark_amp.training import Job, one_turn

    if not numbers:
        return []
    threads = config.THREADS or max(1, cores() // numbers[-1])
    each = config.model_copy(update={"THREADS": threads})
    contenders = []
    for number in numbers:
        job = Job(synthetic(each, updates * number), updates)
        contenders.append(Contender(group(number), partial(one_turn, job, number)))
        if number > 1:
            contenders.append(
                Contender(group(number) + WITHOUT, partial(one_turn, replace(job, exchange=False), number))
            )
    return [*contenders, replace(contenders[0], name=group(numbers[0]) + AGAIN)]


TABLE = Table("scaling", ABOUT, FLAGS, plan, sections, charts)
