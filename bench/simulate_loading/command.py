"""Requests, bytes, shuffling and memory of training from tar files, simulated.

    python scripts/simulate_loading.py -images 1281167 -ranks 8 -batch_size 128
    python scripts/simulate_loading.py -dataset shards -data_path s3://bucket/packed -ranks 8 -machines 2

It runs the order, the cache and the requests of training; only store and pixels are missing. Downloads are as fast as
training. With -data_path, it reads the index of these tar files; else it imagines a set.

Takes the flags and settings of main_single_gpu.py, such as -num_workers (1 if open) and DATA.CACHE_GB.
"""

import json

from tools.common.command_line import OVERWRITE, Tool, above_zero, check_one_process, tool
from tools.common.output_file import writing
from tools.common.tables import in_columns
from utils.errors import EXIT_DONE
from utils.flags import Flag, whole
from utils.log import unheard
from vitamp.files import write_atomically

IMAGINED = (
    Flag("images", "images of the training split", "N", default=1_281_167, kind=whole(2, 10**9)),
    Flag("shard_images", "images per tar file", "N", default=1000, kind=whole(1, 10**9)),
    Flag("image_kb", "size of an image, in 1000 bytes", "X", default=30.0, kind=above_zero),
)
OWN = (
    *IMAGINED,
    Flag("ranks", "processes of the run on each machine", "N", default=1, kind=whole(1, 1024)),
    Flag("machines", "machines of the run", "N", default=1, kind=whole(1, 10**6)),
    Flag("json", "write the results as JSON", "FILE"),
    OVERWRITE,
)
TOOL = Tool("simulate_loading.py", __doc__, OWN)


@tool
def main(argv: list[str]) -> int:
    line = TOOL.read(argv)
    asked, file = line.asked, line.file("json")
    check_one_process("simulate_loading.py")
    config = line.load({"DATA.DATASET": ("shards", "simulate_loading.py")}, resolved=False).config
    data = config.DATA

    # Imported late: torch takes seconds to import, and a wrong command should fail at once.
    from bench.simulate_loading.simulate import Imagined, mixing_and_memory, traffic
    from datasets.labels import ANY_LABEL
    from datasets.shards.source import WINDOW, ShardSet, open_split, open_store

    if data.DATA_PATH is None:
        samples = Imagined(data).samples(asked.images, asked.shard_images, round(1000 * asked.image_kb))
    else:
        line.refuse([flag.name for flag in IMAGINED], "-{}: the set in -data_path has its own; leave it out.")
        samples = open_split(ShardSet(open_store(data.DATA_PATH), data), data, "train", ANY_LABEL, WINDOW)
    uncached = config.changed(DATA={"CACHE_GB": 0})
    with unheard():
        near = traffic(uncached, samples, asked.ranks, asked.machines, 1)[0]
    # The first epoch begins with an empty cache; the others are like the second.
    first, second = traffic(config, samples, asked.ranks, asked.machines, 2)
    alone = {"requests": near["images"], "bytes": near["image_bytes"]}
    ways = {"each image": alone, "near images together": near, "first epoch": first, "second epoch": second}
    found = mixing_and_memory(config, samples, asked.ranks, asked.machines)
    rows = [["One machine requests in an epoch", "requests", "GB", "tar files"]]
    for name, counts in ways.items():
        cached = f" with DATA.CACHE_GB={data.CACHE_GB:g}" if name.endswith("epoch") else ""
        row = f"{counts['requests']:,}", f"{counts['bytes'] / 1e9:,.3g}", f"{counts.get('files', 0):,}"
        rows.append([name + cached, *row])
    listed, ordered = found["list_bytes"] / 1e9, found["order_bytes"] / 1e9
    print(
        f"{found['images']:,} images in {found['files']:,} tar files, {found['bytes'] / 1e9:,.3g} GB; "
        f"{asked.machines:,} x {asked.ranks:,} ranks; {found['updates']:,} updates of {found['global_batch']:,} images",
        *in_columns(rows),
        f"Tar files per update: {found['files_per_update']:,.0f} (fully shuffled: "
        f"{found['files_per_update_shuffled']:,.0f})",
        f"Images between neighbours in storage: {found['apart']:,.0f} (fully shuffled: "
        f"{found['apart_shuffled']:,.0f}); rank correlation {found['rank_correlation']:.3f}",
        f"List of images: {listed:,.3g} GB per machine, and {ordered:,.3g} per rank: "
        f"{listed + ordered * asked.ranks:,.3g} GB",
        sep="\n",
    )
    if file is not None:
        with writing(file, "-json"):
            write_atomically(file, json.dumps({**found, "machine": ways}, indent=1) + "\n")
    return EXIT_DONE
