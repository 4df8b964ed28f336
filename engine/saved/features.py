"""Features of a trained model, computed as in validation."""

from __future__ import annotations

from torch import Tensor

from engine.features.pooling import Pool, pooled_features
from engine.saved.trained import Trained


def features_of(trained: Trained, images: Tensor, pool: Pool) -> Tensor:
    """Features in fp32 of uint8 images (B x C x S x S), in the precision of validation: B x D; patches B x N x D."""
    with trained.computing(len(images)):
        return pooled_features(trained.model, trained.inputs(images.to(trained.precision.device)), pool)
