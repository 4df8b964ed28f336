"""Numbers with their nouns."""

from __future__ import annotations

import pytest

from utils.text import counted


@pytest.mark.parametrize(
    ("number", "noun", "text"),
    [
        *((1, "update", "1 update"), (0, "update", "0 updates"), (1234, "training image", "1,234 training images")),
        *(
            (2, "process", "2 processes"),
            (2, "class", "2 classes"),
            (2, "batch", "2 batches"),
            (2, "epoch", "2 epochs"),
        ),
        *((1.0, "minute", "1 minute"), (0.5, "minute", "0.5 minutes"), (10.0, "minute", "10 minutes")),
    ],
)
def test_noun_follows_its_number(number: float, noun: str, text: str) -> None:
    assert counted(number, noun) == text
