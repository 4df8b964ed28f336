"""What meta.json says of a model and of its images, so that `vitamp.load` needs nothing of this program."""

from __future__ import annotations

from typing import Any

from datasets.decoding.background import background_of
from datasets.given import squeezes
from engine.inputs.normalize import per_channel
from models import timm_call
from utils.config import Config
from utils.config.data import DataConfig


def input_of(data: DataConfig) -> dict[str, Any]:
    """How validation makes the model's input from an image, in the words that exported files use too."""
    return {
        "image_size": data.IMAGE_SIZE,
        "channels": data.IMAGE_CHANNELS,
        "crop": "none" if squeezes(data) else "middle",
        "crop_pct": data.CROP_PCT,
        "crop_mode": data.CROP_MODE,
        "interpolation": data.INTERPOLATION,
        "mean": per_channel(data.IMAGENET_MEAN, data.IMAGE_CHANNELS),
        "std": per_channel(data.IMAGENET_STD, data.IMAGE_CHANNELS),
        "exif_rotate": data.EXIF_ROTATE,
        "background": background_of(data),
    }


def timm_model_of(config: Config) -> dict[str, Any] | None:
    """The call of timm.create_model that builds this model; None if timm alone cannot."""
    if config.MODEL.MAE_PRETRAIN or (config.USE and _is_own(config.MODEL.NAME.strip())):
        return None
    name, arguments = timm_call(config.MODEL, config.DATA.IMAGE_SIZE, config.DATA.IMAGE_CHANNELS)
    return {"name": name, "arguments": arguments}


def _is_own(name: str) -> bool:
    """Whether the user's own code registers the model."""
    from utils.own.registry import own_named

    return own_named("model", name) is not None
