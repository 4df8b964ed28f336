"""Measure how fast images are loaded, compared with timm, and whether that keeps up with the model.

    python scripts/benchmark_data.py -data_path /data/imagenet -appetite 2500
    python scripts/benchmark_data.py -dataset imagefolder -data_path /data/flowers -num_workers 0,4,16 -json speed.json
    python scripts/benchmark_data.py -made 1500 -size small    # no data at hand: makes JPEGs

Per core: images per second of CPU time, from the stored file to uint8 pixels of the model's image size, with
the transforms of training and of validation. Through the loaders: images per second of wall-clock time, as batches
arrive in the training process. vitamp and timm alternate, so that a busy machine slows both. The report shows medians,
and ratios taken within a round.

-appetite N is the number of images per second that the model can train on (training logs images/s; measure it with
-dataset synthetic). The settings and flags of main_single_gpu.py are accepted, such as TRAIN.RAND_AUGMENT=true;
those without a meaning here, such as -amp and -output, have no effect.
"""

from __future__ import annotations

import json

from tools.benchmark_data.measure import sections, verdict
from tools.common.command_line import OVERWRITE, Tool, above_zero, run_tool, some_of, whole_numbers
from tools.common.output_file import writing
from tools.common.tables import for_terminal
from utils.errors import EXIT_DONE, UserError
from utils.flags import Flag, whole
from utils.log import log
from utils.machine.cpus import cores
from utils.text import counted
from vitamp.files import write_atomically

PARTS = ("train", "val", "loader")
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
    asked, json_file, loaded = line.asked, line.file("json", ".json"), line.load()
    config = loaded.config
    if config.DATA.DATA_PATH is not None and line.given & {"made", "size"}:
        raise UserError(
            f"-made and -size are for JPEGs that the tool makes, but DATA.DATA_PATH is {config.DATA.DATA_PATH}; give "
            "one or the other."
        )

    # Imported after all checks: importing torch takes seconds.
    from tools.benchmark_data.measure import measure
    from tools.common.made_images import on_made_images
    from tools.common.turns import Budget

    for note in loaded.notes:
        log.info(note)
    workers = asked.num_workers or (0, *(2**n for n in range(cores().bit_length())))
    if asked.made is not None or (config.DATA.DATA_PATH is None and loaded.sources["DATA.DATASET"] == "default"):
        config = on_made_images(config, asked.made or MADE, asked.size)
    budget = Budget(60 * asked.budget_min)
    results = measure(config, asked.parts or PARTS, asked.rounds, asked.images, workers, budget, argv)

    about = results["images"]
    print(
        f"{about['count']} images, about {about['width']} x {about['height']} and {about['kilobytes']:.0f} KB, "
        f"{100 * about['jpeg']:.0f} % JPEG; {counted(results['rounds'], 'round')} of {results['images_a_round']} images"
    )
    print("\n".join(for_terminal(sections(results))))
    if results["cut"]:
        log.warning(
            "the time ran out (-budget_min) before all rounds were done; results are medians of fewer rounds, or are "
            "missing"
        )
    if asked.appetite is not None:
        results["appetite"], results["verdict"] = asked.appetite, verdict(results, asked.appetite)
        print(f"\n{results['verdict']}")
    if json_file is not None:
        with writing(json_file, "-json"):
            write_atomically(json_file, json.dumps(results, indent=2) + "\n")
        log.info("all measurements: %s", json_file)
    return EXIT_DONE
