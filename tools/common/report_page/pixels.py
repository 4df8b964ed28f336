"""Evaluation of a run without labels, for the report: images with hidden patches, and as the model predicts them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from PIL import Image
from torch import Tensor

from datasets import ImageDataset
from engine.saved.predictions import name_of
from engine.saved.trained import Trained
from tools.common.report_page.opening import Headline
from tools.common.report_page.pictures import data_uri, short_name
from utils.record.tasks import Metric

SHOWN = 8


class Painted(NamedTuple):
    """One image, as data: URIs."""

    name: str
    short: str
    hidden: str
    predicted: str
    original: str


@dataclass(frozen=True)
class Evaluation:
    template: ClassVar[str] = "pixels.html"
    weights: str
    """Model, checkpoint, and which of its weights were used"""
    hidden: float
    """Percent of the patches"""
    normalised: bool
    images: list[Painted]
    image: str
    """What an image of its split is called"""

    def headline(self, deciding: Metric) -> Headline | None:
        """None: only validation measures how much of the images is explained."""
        return None


def evaluated(trained: Trained, dataset: ImageDataset, image: str) -> Evaluation:
    """`image`: what an image of this split is called."""
    indices = torch.linspace(0, len(dataset) - 1, min(SHOWN, len(dataset))).long().unique().tolist()
    batch = dataset.__getitems__([(0, index) for index in indices]).images.to(trained.precision.device)
    model: Any = trained.model
    inputs = trained.inputs(batch)
    hidden, predicted = model.painted(inputs)
    rows = zip(indices, *(_pictures(trained, images) for images in (hidden, predicted, inputs)), strict=True)
    return Evaluation(
        weights=f"{trained.words()}: {trained.chosen.words}",
        hidden=100 * trained.config.MODEL.MASK_RATIO,
        normalised=trained.config.MODEL.NORM_PIX_LOSS,
        images=[Painted(name := name_of(dataset, index), short_name(name), *pictures) for index, *pictures in rows],
        image=image,
    )


def _pictures(trained: Trained, images: Tensor) -> list[str]:
    """Normalised images as data: URIs."""
    inputs: Any = trained.inputs
    pixels = ((images - inputs.offset) / inputs.factor).round().clamp(0, 255).byte().cpu().permute(0, 2, 3, 1).numpy()
    return [data_uri(Image.fromarray(one[:, :, 0] if one.shape[2] == 1 else one)) for one in pixels]
