"""How fast do images reach the model, and is that fast enough? Measured beside timm and torchvision, in turns.

    python scripts/benchmark_data.py -data_path /data/imagenet -appetite 2500
    python scripts/benchmark_data.py -dataset imagefolder -data_path /data/flowers -num_workers 0,4,16 -json speed.json
    python scripts/benchmark_data.py -made 1500 -size small        # no data at hand: on JPEGs that it makes

Per core: images a second of one core's time, from the stored file to uint8 pixels of the size the model takes, by
training's and by validation's way; packed: the same images after scripts/pack_images.py. Through the loaders: batches
as they arrive in the process that trains, by the clock. By stage: where our path spends its time. All in rounds in
which everything has its turn, so that a busy machine slows all of them alike; figures are medians of the rounds, and
ratios are taken within them.

-appetite N says how many images a second the model could take (training prints images/s; measure with -dataset
synthetic). All flags and settings of main_single_gpu.py hold, TRAIN.RAND_AUGMENT=true for one.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.common.command_line import OVERWRITE, Tool, ToolLine, run_tool
from utils.cli import Flag
from utils.config import Loaded
from utils.cpus import cores
from utils.errors import EXIT_DONE, UserError, nearest
from utils.log import log

PARTS = ("train", "val", "packed", "stages", "loader")
SIZES = {"small": "500 x 375, 100 KB", "large": "1600 x 1200, 940 KB"}
MADE = 1500
OWN = (
    Flag("made", f"use N JPEGs that it makes, once (default {MADE} where there is no -data_path)", "N", ("MADE",)),
    Flag("size", f"of those: {' or '.join(f'{n} ({a})' for n, a in SIZES.items())}", "NAME", ("SIZE",)),
    Flag("rounds", "how often everything has its turn (default 5)", "N", ("ROUNDS",)),
    Flag("images", "images of each turn (default 500)", "N", ("IMAGES",)),
    Flag(
        "num_workers",
        "loading processes, such as 0,1,4 (default: powers of two up to the cores)", "A,B",
        ("WORKERS",),
        old=("workers",),
    ),
    Flag("parts", f"what to measure (default {','.join(PARTS)})", "A,B", ("PARTS",)),
    Flag("appetite", "images a second the model could take", "N", ("APPETITE",)),
    Flag("budget_min", "minutes in all; ends in time with what it has (default 10)", "M", ("BUDGET_MIN",)),
    Flag("json", "write all figures, with machine, versions and command", "FILE", ("JSON",)),
    Flag("plot", "draw them", "FILE.png", ("PLOT",), old=("out",)),
    OVERWRITE,
)  # fmt: skip
TOOL = Tool("benchmark_data.py", __doc__, OWN)


@dataclass(frozen=True)
class Wishes:
    made: int | None
    size: str
    rounds: int
    images: int
    workers: tuple[int, ...]
    parts: tuple[str, ...]
    appetite: float | None
    seconds: float
    json: Path | None
    plot: Path | None


def main(argv: list[str]) -> int:
    return run_tool(_benchmark, argv)


def _benchmark(argv: list[str]) -> int:
    line = TOOL.read(argv)
    wishes = _wishes(line)
    loaded = line.load()
    _check(loaded, line, wishes)

    # Only now, with everything known to be right: importing torch takes seconds.
    from engine.machine.device import pick_device
    from tools.benchmark_data.report import report
    from tools.benchmark_data.run import Benchmark, Plan
    from tools.common.made_images import on_made_images
    from utils.distributed.world import ALONE

    config = loaded.config
    for note in loaded.notes:
        log.info(note)
    device = pick_device(config.DEVICE, ALONE)
    plan = Plan(wishes.rounds, wishes.images, wishes.workers, wishes.seconds, wishes.parts)
    if wishes.made is not None or (config.DATA.DATA_PATH is None and loaded.sources["DATA.DATASET"] == "default"):
        config = on_made_images(config, wishes.made or MADE, wishes.size)
    found = Benchmark(config, plan, device).run()
    report(found, wishes.appetite, wishes.json)
    if wishes.plot is not None:
        from tools.benchmark_data.picture import draw

        draw(wishes.plot, found, wishes.appetite)
        log.info("the picture: %s", wishes.plot)
    return EXIT_DONE


def _wishes(line: ToolLine) -> Wishes:
    size = _given(line, "SIZE", "small")
    if size not in SIZES:
        raise UserError(f"-size {size}: takes {' or '.join(SIZES)}.{nearest(size, SIZES)}")
    return Wishes(
        made=line.whole("MADE", MADE) if "MADE" in line.own else None,
        size=size,
        rounds=line.whole("ROUNDS", 5),
        images=line.whole("IMAGES", 500),
        workers=_workers(line),
        parts=_parts(line),
        appetite=line.above_zero("APPETITE", 1000) if "APPETITE" in line.own else None,
        seconds=60 * line.above_zero("BUDGET_MIN", 10),
        json=line.file("JSON", ".json") if "JSON" in line.own else None,
        plot=line.file("PLOT", ".png") if "PLOT" in line.own else None,
    )


def _given(line: ToolLine, key: str, default: Any = None) -> Any:
    return line.own.get(key, (default, ""))[0]


def _workers(line: ToolLine) -> tuple[int, ...]:
    text = _given(line, "WORKERS")
    if text is None:
        return (0, *(2**n for n in range(cores().bit_length())))
    words = text.split(",")
    if not all(word.isdecimal() for word in words):
        raise UserError(f"-num_workers {text}: takes whole numbers with commas between them, such as 0,1,4.")
    return tuple(sorted({int(word) for word in words}))


def _parts(line: ToolLine) -> tuple[str, ...]:
    text = _given(line, "PARTS", ",".join(PARTS))
    for word in text.split(","):
        if word not in PARTS:
            raise UserError(
                f"-parts {text}: there is no part {word!r}.{nearest(word, PARTS)} Known: {', '.join(PARTS)}."
            )
    return tuple(text.split(","))


def _check(loaded: Loaded, line: ToolLine, wishes: Wishes) -> None:
    folder = loaded.config.DATA.DATA_PATH
    if folder is not None and (wishes.made is not None or "SIZE" in line.own):
        raise UserError(
            f"-made and -size are about JPEGs that are made; DATA.DATA_PATH {folder} names others. Give one."
        )
