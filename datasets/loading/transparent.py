"""Counts the images with transparent pixels that a loader reads, for one line in the log."""

from __future__ import annotations

from utils.distributed.world import World, all_gather
from utils.log import log


class Transparent:
    """Images with transparent pixels. Only an image's crop is decoded, so only transparency in the crop counts."""

    def __init__(self, kind: str, background: str) -> None:
        """`kind`: training or evaluated. `background`: what happens to transparent pixels."""
        self.kind, self.background = kind, background
        self._transparent = self._images = 0
        self._logged = False

    def add(self, transparent: int, images: int) -> None:
        self._transparent += transparent
        self._images += images

    def log_once(self, world: World) -> None:
        """Log the count of all ranks, once: after the first epoch or validation. A collective call."""
        if self._logged:
            return
        self._logged = True
        counts = all_gather([(self._transparent, self._images)], world)
        self._transparent, self._images = (sum(column) for column in zip(*counts, strict=True))
        if summary := self.summary():
            log.info("%s", summary)

    def summary(self) -> str:
        """Sentence for the log; '' if no image has transparent pixels."""
        if not self._transparent:
            return ""
        of = f"{self._transparent:,} of {self._images:,} {self.kind} images"
        return f"{of} have transparent pixels: {self.background}"
