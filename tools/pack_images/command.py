"""Pack images once, resized, into a few tar files, from which training reads several times faster.

    python scripts/pack_images.py /data/imagenet /data/packed
    python scripts/pack_images.py /data/flowers /data/packed -dataset imagefolder -short_side 320 -quality 95
    python scripts/pack_images.py /data/imagenet /data/raw -raw

Then train with -dataset shards -data_path /data/packed. After an interruption the same command resumes. SRC is the
folder that -data_path would name, or hf:NAME. All data sets that are stored as images can be packed. Unreadable images
are reported and left out.

The processes of torchrun, srun or mpirun share the work.

-dataset, -cfg and KEY=VALUE work as in main_single_gpu.py.
"""

from pathlib import Path
from typing import Any

from tools.common.command_line import Tool, ToolLine, tool
from tools.common.output_file import if_interrupted
from tools.common.ranks import ranks_of_launcher
from utils.config import Loaded
from utils.config.keys import MEASURED
from utils.config.kinds import one_line
from utils.config.read import Kind, Source
from utils.distributed.world import on_every_rank
from utils.errors import EXIT_DONE, UserError
from utils.flags import Flag, Positional, whole

OWN = (
    Flag(
        "short_side",
        "pixels of the shorter side; smaller images keep their size",
        "N",
        default=256,
        kind=whole(1, 65535),
    ),
    Flag("quality", "JPEG quality, 1 to 100", "N", default=90, kind=whole(1, 100)),
    Flag("raw", "store pixels instead of JPEG: no decoding, but 6 to 7 times the size of packed JPEGs"),
    Flag("keep", "copy files unchanged, byte for byte"),
    Flag("shard_images", "images per tar file", "N", default=1000, kind=whole(1, 10**9)),
    Flag("num_workers", "packing processes", "N", kind=whole(1, 1024), default_text="one per core"),
)
PLACES = (Positional("places", "SRC DST", "what to pack, and the folder to write", "*"),)
TOOL = Tool(
    "pack_images.py",
    __doc__,
    OWN,
    PLACES,
    one_label="packed tar files hold one label per image; train from the unpacked images",
)


@tool
def main(argv: list[str]) -> int:
    """Check the settings on all ranks, and pack SRC into DST."""
    command_line = TOOL.read(argv)
    places = command_line.asked.places or []
    if len(places) != 2:
        given = f"got {len(places)}: {' '.join(places)}" if places else "got neither"
        raise UserError(f"pack_images.py needs SRC (what to pack) and DST (the folder to write); {given}. See -h.")
    if "DATA.DATA_PATH" in command_line.run.flags:
        raise UserError("-data_path: give the path as SRC, the first argument of pack_images.py.")
    src, dst = places
    packed = Path(dst).expanduser()
    source = Path(src).expanduser().resolve()
    if source.is_dir() and packed.resolve().is_relative_to(source):
        raise UserError(f"{dst}: is inside {src}, where it would be read as a class; name a folder beside it.")
    src_key = "DATA.DATASET" if src.startswith("hf:") else "DATA.DATA_PATH"
    settings: dict[str, tuple[Any, str]] = {src_key: (src, Source("SRC", Kind.TOOL))}
    if command_line.asked.keep:
        # Mean and deviation have no effect on packing, and would be measured on the data if they were not set here.
        _value_range, *mean_and_deviation = MEASURED
        settings |= dict.fromkeys(mean_and_deviation, ("0.5", Source("-keep", Kind.TOOL)))
    with ranks_of_launcher(argv, command_line.run.ranks) as world:
        loaded = on_every_rank(world, lambda: command_line.load(settings))

        # Imported late: torch takes seconds to import, and a wrong command should fail at once.
        from tools.pack_images.run import pack

        if_interrupted.append("finished tar files stay, and the same command resumes")
        stored_settings = on_every_rank(world, lambda: _stored_settings(command_line, loaded))
        jobs = command_line.asked.num_workers
        pack(loaded.config.DATA, packed, stored_settings, jobs=jobs, world=world)
    return EXIT_DONE


def _stored_settings(command_line: ToolLine, loaded: Loaded) -> dict[str, int | str | bool]:
    """Return the settings that the packed bytes depend on: stored with them, and compared when packing resumes.

    Raises UserError for flags that exclude each other or have no effect.
    """
    from datasets.base import background_of

    data = loaded.config.DATA
    given = command_line.given
    if "raw" in given and "keep" in given:
        raise UserError("-raw and -keep exclude each other; give one.")
    kind = "jpeg"
    for name in ("raw", "keep"):
        if name in given:
            kind = name
    if kind != "keep" and not data.is_plain:
        raise UserError("DATA.BITS, DATA.IMAGE_CHANNELS: such images are packed as they are stored; add -keep.")
    without_effect = {"keep": ("short_side", "quality"), "raw": ("quality",)}.get(kind, ())
    reason = f"has no effect with -{kind}; leave it out."
    command_line.refuse(without_effect, "-{} " + reason)  # `refuse` puts the flag's name in place of {}
    settings: dict[str, int | str | bool] = {"kind": kind}
    for name in ("short_side", "quality", "shard_images"):
        if name not in without_effect:
            settings[name] = getattr(command_line.asked, name)

    # -keep leaves rotation and background to training, so they must not be set here. But if SRC is itself a packed data
    # set, they are settings of that packing (their source is "packing"), and stay.
    keys = ("DATA.EXIF_ROTATE", "DATA.BACKGROUND")
    src_is_packed = any(loaded.sources[key] == "packing" for key in keys)
    if kind != "keep" or src_is_packed:
        settings["background"] = one_line(background_of(data) if data.BACKGROUND == "mean" else data.BACKGROUND)
    else:
        for key in keys:
            if not loaded.is_default(key):
                raise UserError(f"{key} has no effect with -keep. Leave it out here, and set it when training.")
    return settings | {"channels": data.IMAGE_CHANNELS, "upright": data.EXIF_ROTATE}
