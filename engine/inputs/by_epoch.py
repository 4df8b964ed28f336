"""Callbacks that change the model's input from epoch to epoch: dropped tokens and image sizes."""

from timm.layers.patch_dropout import PatchDropout
from torch import nn

from engine.callback import Callback, Figure
from utils.config.kinds import one_line
from utils.config.train import TrainConfig
from vitamp.sizes import ImageSize


class TokenDrop(Callback):
    """Sets the model's patch dropout. Tokens are drawn anew for each sample, by its micro-batch's random numbers."""

    def __init__(self, train: TrainConfig) -> None:
        self._train = train
        self._probability = 0.0

    def enter(self, epoch: int, *models: nn.Module) -> None:
        self._probability = self._train.TOKEN_DROP if self._train.drops_tokens_in(epoch) else 0.0
        for model in models:
            for module in model.modules():
                if isinstance(module, PatchDropout):
                    module.prob = self._probability

    def figures(self) -> dict[str, Figure]:
        return {"token_drop": Figure(self._probability, f"Patches left out: {100 * self._probability:g}%")}

    def rows(self) -> dict[str, str]:
        epochs_without = self._train.TOKEN_DROP_TAIL
        tail = ""
        if epochs_without:
            epochs = f"{epochs_without} epochs" if epochs_without > 1 else "epoch"
            tail = f", none in the last {epochs}"
        return {"shortcuts": f"{100 * self._train.TOKEN_DROP:g} % of the patches left out{tail}"}


class ImageSizes(Callback):
    """TRAIN.SIZE_SCHEDULE: reports the size of training images, which the data set makes (`variants.Sized`)."""

    def __init__(self, train: TrainConfig, full: ImageSize) -> None:
        """`full`: size of the images in epochs for which the schedule has none."""
        self._train = train
        self._full_size = full
        self._size = full

    def enter(self, epoch: int, *models: nn.Module) -> None:
        self._size = self._train.size_in(epoch, self._full_size)

    def figures(self) -> dict[str, Figure]:
        if isinstance(self._size, int):
            return {"image_size": Figure(self._size, f"Size: {self._size}")}
        height, width = self._size
        return {"image_height": Figure(height, f"Height: {height}"), "image_width": Figure(width, f"Width: {width}")}

    def rows(self) -> dict[str, str]:
        """Return the row of the banner that lists each image size with its first epoch: {name of the row: words}.

        The row has the name of that of dropped tokens, `shortcuts`, so that the banner joins both.
        """
        changes = []
        previous_size = None
        for epoch in range(1, max(1, self._train.NUM_EPOCHS) + 1):
            size = self._train.size_in(epoch, self._full_size)
            if size != previous_size:
                changes.append(f"{one_line(size)} from epoch {epoch}")
            previous_size = size
        return {"shortcuts": f"images of {', '.join(changes)}"}
