"""One's own augmentation (-use) of single training images: applied, checked, and taken into loading processes."""

from pathlib import Path
from typing import Any

from PIL import Image

from utils.own_code import OWN_ERRORS, OwnCodeError, execute, own_lines
from vitamp.registry import own_named


class OwnChange:
    """Applies it to an image, and checks what it returns."""

    def __init__(self, name: str) -> None:
        own = own_named("augmentation", name)
        assert own is not None  # checked with the settings
        self.name = name
        self.file = own.file
        self.values = own.values
        self._change = own.made()

    def __call__(self, image: Image.Image) -> Image.Image:
        """Apply the user's augmentation. OwnCodeError if it fails, or returns an image of another size or mode."""
        try:
            changed = self._change(image)
        except OWN_ERRORS as error:
            raise OwnCodeError(own_lines(error) or f"{self.file}: augmentation {self.name}: {error}") from None
        is_image = isinstance(changed, Image.Image)
        if not is_image or changed.size != image.size or changed.mode != image.mode:
            returned = f"a {changed.mode} image of {changed.size}" if is_image else type(changed).__name__
            where = f"{self.file}: augmentation {self.name}"
            raise OwnCodeError(f"{where} returned {returned}; it must return a {image.mode} image of {image.size}.")
        return changed

    def __reduce__(self) -> Any:
        """Pickle for loading processes that are spawned: they execute the user's file again."""
        return _again, (self.file, self.name, self.values)


def _again(file: str, name: str, values: dict[str, Any]) -> OwnChange:
    execute(Path(file))
    own = own_named("augmentation", name)
    assert own is not None
    own.values = values
    return OwnChange(name)
