"""Settings of the model that must fit together."""

from __future__ import annotations

from collections.abc import Iterator

from .schema import Config

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
    source = model.PRETRAINED or (model.RESUME if model.RESUME != AUTO else None)
    if model.RESUME_EMA and source is None:
        yield "MODEL.RESUME_EMA", "true takes the average of a run for the weights; name the run by -pretrained"
    if model.NEW_CLASSIFIER and not (model.PRETRAINED or model.RESUME):
        yield "MODEL.NEW_CLASSIFIER", "true, but all of the model is new without weights to start from (-pretrained)"


def _either(numbers: list[int]) -> str:
    return " or ".join(str(number) for number in numbers)
