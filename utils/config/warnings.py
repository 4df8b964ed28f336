"""Settings that work together, but perhaps not as the user expects: warnings for the log."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from utils.config.keys import value_of
from utils.config.read import Entry
from utils.config.schema import Config
from utils.config.write import one_line

SCALE = "TRAIN.LINEAR_SCALED_LR"
LEARNING_RATES = ("TRAIN.BASE_LR", "TRAIN.WARMUP_START_LR", "TRAIN.END_LR")


def warnings(config: Config, layers: Sequence[Mapping[str, Entry]], sources: Mapping[str, str]) -> Iterator[str]:
    """`layers`: the settings of BASE files, file and command line; the last one wins. `sources`: key -> where."""
    yield from _scaled_learning_rates(config, layers, sources)
    if config.DATA.SAMPLER == "balanced" and config.TRAIN.CLASS_WEIGHTS is not None:
        yield (
            f"DATA.SAMPLER balanced draws all classes equally often, and TRAIN.CLASS_WEIGHTS "
            f"{config.TRAIN.CLASS_WEIGHTS} weighs their images besides: rare classes may count too much. Use one of "
            "the two."
        )


def _scaled_learning_rates(
    config: Config, layers: Sequence[Mapping[str, Entry]], sources: Mapping[str, str]
) -> Iterator[str]:
    """A warning about learning rates that LINEAR_SCALED_LR multiplies though their setter may not expect it.

    That is where a rate is set in a later layer than the scale: on the command line over a file, in a file over its
    BASE.
    """
    reference = config.TRAIN.scale_reference
    if reference is None:
        return

    def layer_of(key: str) -> int:
        return max((number for number, layer in enumerate(layers) if key in layer), default=-1)

    later = [key for key in LEARNING_RATES if layer_of(key) > layer_of(SCALE) and value_of(config, key)]
    if later:
        rates = ", ".join(f"{key} {one_line(value_of(config, key))} ({sources[key]})" for key in later)
        yield (
            f"{rates}: multiplied by (global batch / {reference:g}), because {SCALE} is {reference:g} "
            f"({sources[SCALE]}). Set {SCALE}=null to train at the given learning rate"
        )
