"""Settings of the model that must fit together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from utils.config.schema import Config

AUTO = "auto"
"""What -resume takes for: go on if there is anything."""

Problem = tuple[str, str]
"""(the key to change, what is wrong with its value)"""


def misfits_of_model(config: Config) -> Iterator[Problem]:
    model, size = config.MODEL, config.DATA.IMAGE_SIZE
    if model.PATCH_SIZE and size % model.PATCH_SIZE:
        below = size - size % model.PATCH_SIZE
        near = f"{below} or {below + model.PATCH_SIZE}" if below else str(model.PATCH_SIZE)
        yield "DATA.IMAGE_SIZE", f"{size} is not divisible by MODEL.PATCH_SIZE {model.PATCH_SIZE}; near it: {near}"
    heads, width = model.NUM_HEADS, model.EMBED_DIM
    if isinstance(heads, int) and width and model.ATTN_HEAD_SIZE is None and width % heads:
        fitting = [n for n in range(1, width + 1) if width % n == 0]
        near = sorted(sorted(fitting, key=lambda n: abs(n - heads))[:2])
        yield "MODEL.NUM_HEADS", f"{heads} does not divide MODEL.EMBED_DIM {width}; near it: {_either(near)}"
    if model.RESUME == AUTO and config.OUTPUT is None:
        yield "MODEL.RESUME", "auto looks in the run's own folder; name it with -output"


def remarks_on_model(config: Config, given: Mapping[str, str]) -> Iterator[str]:
    """What of these settings has no effect."""
    model = config.MODEL
    goes_on = model.RESUME is not None and model.RESUME != AUTO
    if goes_on and "MODEL.PRETRAINED" in given and model.PRETRAINED:
        yield "MODEL.PRETRAINED has no effect where a run is gone on with: its own weights are taken"
    if model.RESUME_EMA and not (model.PRETRAINED or goes_on):
        yield "MODEL.RESUME_EMA has no effect without a run to take the average from (-pretrained RUN)"
    if model.NEW_CLASSIFIER and not model.PRETRAINED:
        yield "MODEL.NEW_CLASSIFIER has no effect without weights to start from (-pretrained)"


def _either(numbers: list[int]) -> str:
    return " or ".join(str(number) for number in numbers)
