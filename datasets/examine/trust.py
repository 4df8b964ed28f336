"""Doubts about an accuracy: reasons why it may be another on new images. Each says how much it may be worth."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Doubt:
    """A reason why an accuracy that was measured on some images may be another on new images.

    The keys in JSON are the names of these fields.
    """

    kind: str
    """What it is about, in a word, such as shortcut or relatives"""
    sentence: str
    """What was found: the number, its 95 % interval, and of which images or classes it speaks"""
    points: float | None = None
    """Percentage points by which the accuracy may be too high because of it; None if it was not measured"""
    advice: str = ""
    """What to do about it; '' if nothing can be done"""
    images: list[str] = field(default_factory=list)
    """Names of some images that show it"""
