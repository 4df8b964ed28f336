"""Images on the report's page, and short names for them."""

from __future__ import annotations

import base64
import io
from pathlib import PurePath

from PIL import Image

THUMBNAIL = 112
MOST_LETTERS = 36


def data_uri(picture: Image.Image) -> str:
    """Thumbnail as a data: URI."""
    size = max(picture.size)
    if size > THUMBNAIL:
        picture = picture.copy()
        picture.thumbnail((THUMBNAIL, THUMBNAIL))
    elif size < THUMBNAIL // 2:  # so that single pixels are visible
        factor = THUMBNAIL // size
        picture = picture.resize((picture.width * factor, picture.height * factor), Image.Resampling.NEAREST)
    content = io.BytesIO()
    picture.save(content, "PNG", optimize=True)
    return f"data:image/png;base64,{base64.b64encode(content.getvalue()).decode()}"


def short_name(image: str) -> str:
    """Last folder and file of a path, or the file alone where both would be long; the middle of a long name is cut."""
    last = "/".join(PurePath(image).parts[-2:])
    text = last if len(last) <= MOST_LETTERS else PurePath(image).name
    half = MOST_LETTERS // 2
    return text if len(text) <= MOST_LETTERS else f"{text[: half - 1]}…{text[-half:]}"
