"""Learning rates that LINEAR_SCALED_LR multiplies though whoever set them may not expect it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from utils.config.keys import value_of
from utils.config.read import Entry
from utils.config.schema import Config
from utils.config.write import one_line

SCALE = "TRAIN.LINEAR_SCALED_LR"
RATES = ("TRAIN.BASE_LR", "TRAIN.WARMUP_START_LR", "TRAIN.END_LR")


def scaled_unasked(config: Config, layers: Sequence[Mapping[str, Entry]], sources: Mapping[str, str]) -> Iterator[str]:
    """A warning where a rate was set above the layer that sets the scale: by a word over a file, a file over its BASE.

    `layers`: what BASE files, the file and the command line set, the last of which wins.
    """
    reference = config.TRAIN.scale_reference
    if reference is None:
        return

    def layer_of(key: str) -> int:
        return max((number for number, layer in enumerate(layers) if key in layer), default=-1)

    above = [key for key in RATES if layer_of(key) > layer_of(SCALE) and value_of(config, key)]
    if above:
        rates = ", ".join(f"{key} {one_line(value_of(config, key))} ({sources[key]})" for key in above)
        yield (
            f"{rates}: multiplied by the global batch / {SCALE} {reference:g} ({sources[SCALE]}). "
            f"{SCALE}=null takes rates as they are"
        )
