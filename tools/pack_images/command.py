"""Pack images once, small, into a few large files, from which training reads them several times faster.

    python scripts/pack_images.py /data/imagenet /data/packed
    python scripts/pack_images.py /data/flowers /data/packed -dataset imagefolder -short_side 320 -quality 95
    python scripts/pack_images.py /data/imagenet /data/raw -raw
    python scripts/pack_images.py -verify /data/packed

Then train with -dataset shards -data_path /data/packed. Killed or interrupted, the same command goes on where it was.
SRC is what -data_path would be, or hf:NAME; any -dataset but those that lie in memory. Broken images are named and
left out.

-dataset, -cfg and KEY=VALUE hold as for main_single_gpu.py.
"""

from __future__ import annotations

from pathlib import Path

from tools.common.command_line import Tool, ToolLine, run_tool
from utils.config import Config
from utils.errors import EXIT_DONE, EXIT_INTERRUPTED, UserError
from utils.flags import Flag, Place
from utils.log import log

SHORT_SIDE, QUALITY, SHARD_IMAGES = 256, 90, 1000
OWN = (
    Flag("short_side", f"pixels of the shorter side; smaller images stay (default {SHORT_SIDE})", "N", ("SHORT_SIDE",)),
    Flag("quality", f"of the JPEG files, 1 to 100 (default {QUALITY})", "N", ("QUALITY",)),
    Flag("raw", "keep pixels instead of JPEG files: no decoding, 6 to 7 times the room", keys=("RAW",)),
    Flag("keep", "keep the files as they are, byte for byte", keys=("KEEP",)),
    Flag("shard_images", f"images in a tar file (default {SHARD_IMAGES})", "N", ("SHARD_IMAGES",)),
    Flag("num_workers", "processes that pack (default: one per core)", "N", ("JOBS",), old=("jobs",)),
    Flag("verify", "compare a packed folder with its checksums, and do nothing else", "DST", ("VERIFY",)),
)
PLACES = (Place("places", "SRC DST", "what to pack, and the folder to pack it into", "*"),)
TOOL = Tool("pack_images.py", __doc__, OWN, PLACES)


def main(argv: list[str]) -> int:
    return run_tool(_pack, argv)


def _pack(argv: list[str]) -> int:
    line = TOOL.read(argv)
    places = line.asked.places or []
    jobs = line.whole("JOBS", 1, 1, 1024) if "JOBS" in line.own else None
    if "VERIFY" in line.own:
        if places:
            raise UserError(f"-verify looks at one folder and packs nothing; what is {places[0]} for?")
        from tools.pack_images.verify import verify

        return verify(Path(line.own["VERIFY"][0]).expanduser(), jobs)
    if len(places) != 2:
        what = f"got {len(places)}: {' '.join(places)}" if places else "got neither"
        raise UserError(f"pack_images.py needs two places: SRC, what to pack, and DST, where to; {what}. -h shows how.")
    config = _config(line, places[0])

    # Only now, with the settings known to be right: importing torch takes seconds.
    from tools.pack_images.run import pack

    try:
        pack(config.DATA, config.MODEL.NUM_CLASSES, Path(places[1]).expanduser(), _how(line, config), jobs)
    except KeyboardInterrupt:
        log.warning("interrupted; the tar files that are finished stay, and the same command goes on")
        return EXIT_INTERRUPTED
    return EXIT_DONE


def _config(line: ToolLine, source: str) -> Config:
    if "DATA.DATA_PATH" in line.run.flags:
        raise UserError("-data_path: pack_images.py takes it as its first word, SRC.")
    place = "DATA.DATASET" if source.startswith("hf:") else "DATA.DATA_PATH"
    return line.load({place: (source, "SRC")}).config


def _how(line: ToolLine, config: Config) -> dict[str, int | str | bool]:
    """All that the packed bytes depend on besides the images: kept with them, and compared when packing goes on."""
    chosen = [name for name in ("RAW", "KEEP") if name in line.own]
    if len(chosen) > 1:
        raise UserError("-raw and -keep exclude each other; give one of them.")
    idle = ["QUALITY"] if chosen == ["RAW"] else ["QUALITY", "SHORT_SIDE"] if chosen else []
    for name in idle:
        if name in line.own:
            raise UserError(f"-{name.lower()} has no effect with -{chosen[0].lower()}; leave it out.")
    if chosen == ["KEEP"] and config.DATA.EXIF_ROTATE:
        raise UserError(
            "DATA.EXIF_ROTATE=true has no effect with -keep, which keeps files byte for byte. Leave it out here, and "
            "give it when training."
        )
    how: dict[str, int | str | bool] = {"kind": chosen[0].lower() if chosen else "jpeg"}
    if "SHORT_SIDE" not in idle:
        how["short_side"] = line.whole("SHORT_SIDE", SHORT_SIDE, 1, 65535)
    if "QUALITY" not in idle:
        how["quality"] = line.whole("QUALITY", QUALITY, 1, 100)
    how["shard_images"] = line.whole("SHARD_IMAGES", SHARD_IMAGES, 1, 10**9)
    return {**how, "channels": config.DATA.IMAGE_CHANNELS, "upright": config.DATA.EXIF_ROTATE}
