"""Measure how fast images are loaded, compared with timm and torchvision, and whether that keeps up with the model.

    python scripts/benchmark_data.py -data_path /data/imagenet -appetite 2500
    python scripts/benchmark_data.py -dataset imagefolder -data_path /data/flowers -num_workers 0,4,16 -json speed.json
    python scripts/benchmark_data.py -made 1500 -size small    # no data at hand: makes JPEGs

Per core: images per second of CPU time, from the stored file to uint8 pixels of the model's image size, with
the transforms of training and of validation; `packed` is the same for images packed by scripts/pack_images.py. Through
the loaders: images per second of wall-clock time, as batches arrive in the training process. By stage: CPU time of
each stage of vitamp's loading. The contenders (vitamp, timm, torchvision, ...) alternate, so that a busy machine slows
all of them. The report shows medians, and ratios taken within a round.

-appetite N is the number of images per second that the model can train on (training logs images/s; measure it with
-dataset synthetic). The settings and flags of main_single_gpu.py are accepted, such as TRAIN.RAND_AUGMENT=true;
those without a meaning here, such as -amp and -output, have no effect.
"""

from __future__ import annotations

from tools.common.command_line import OVERWRITE, Tool, ToolLine, above_zero, run_tool, some_of, whole_numbers
from utils.config import Loaded
from utils.errors import EXIT_DONE, UserError
from utils.flags import Flag, whole
from utils.log import log
from utils.machine.cpus import cores

PARTS = ("train", "val", "packed", "stages", "loader")
SIZES = {"small": "500 x 375, 100 KB", "large": "1600 x 1200, 940 KB"}
MADE = 1500
OWN = (
    Flag(
        "made",
        "measure on N JPEGs that the tool makes once",
        "N",
        kind=whole(1),
        default_text=f"{MADE} without -data_path",
    ),
    Flag(
        "size",
        f"size of the JPEGs of -made: {' or '.join(f'{name} ({about})' for name, about in SIZES.items())}",
        "NAME",
        default="small",
        choices=tuple(SIZES),
    ),
    Flag("rounds", "how often each contender is measured", "N", default=5, kind=whole(1)),
    Flag("images", "images per measurement", "N", default=500, kind=whole(1)),
    Flag(
        "num_workers",
        "loading processes, such as 0,1,4",
        "A,B",
        default_text="0 and the powers of two up to the number of cores",
        kind=whole_numbers(0),
    ),
    Flag("parts", "what to measure", "A,B", kind=some_of(*PARTS), default_text=",".join(PARTS)),
    Flag("appetite", "images per second that the model can train on", "N", kind=above_zero),
    Flag("budget_min", "time limit in minutes; reports what was measured until then", "M", default=10, kind=above_zero),
    Flag("json", "write all measurements, with machine, versions and command", "FILE"),
    Flag("plot", "draw the results", "FILE.png"),
    OVERWRITE,
)
TOOL = Tool(
    "benchmark_data.py",
    __doc__,
    OWN,
    one_label="the compared loaders support one label per image; leave it out",
)


def main(argv: list[str]) -> int:
    return run_tool(_benchmark, argv)


def _benchmark(argv: list[str]) -> int:
    line = TOOL.read(argv)
    asked = line.asked
    json_file, picture = line.file("json", ".json"), line.file("plot", ".png")
    loaded = line.load()
    _check(loaded, line)

    # Imported after all checks: importing torch takes seconds.
    from engine.machine.device import pick_device
    from tools.benchmark_data.report import charts, report
    from tools.benchmark_data.run import Benchmark, Plan
    from tools.common.made_images import on_made_images
    from utils.distributed.world import ALONE

    config = loaded.config
    for note in loaded.notes:
        log.info(note)
    device = pick_device(config.DEVICE, ALONE)
    workers = asked.num_workers or (0, *(2**n for n in range(cores().bit_length())))
    plan = Plan(asked.rounds, asked.images, workers, 60 * asked.budget_min, asked.parts or PARTS)
    if asked.made is not None or (config.DATA.DATA_PATH is None and loaded.sources["DATA.DATASET"] == "default"):
        config = on_made_images(config, asked.made or MADE, asked.size)
    results = Benchmark(config, plan, device).run()
    report(results, asked.appetite, json_file)
    if picture is not None:
        from tools.common.results.picture import draw

        draw(picture, charts(results, asked.appetite), f"{results['machine']}, {results['date']}: {results['command']}")
        log.info("chart written to %s", picture)
    return EXIT_DONE


def _check(loaded: Loaded, line: ToolLine) -> None:
    path = loaded.config.DATA.DATA_PATH
    if path is not None and line.given & {"made", "size"}:
        raise UserError(
            f"-made and -size are for JPEGs that the tool makes, but DATA.DATA_PATH is {path}; give one or the other."
        )
