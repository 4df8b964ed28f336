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
    """What was found, without a full stop: the number, its 95 % interval, and of which images or classes it speaks"""
    points: float | None = None
    """Percentage points by which the accuracy may be too high because of it; negative: too low. None: not measured"""
    advice: str = ""
    """What to do about it, without a full stop; '' if nothing can be done"""
    images: list[str] = field(default_factory=list)
    """Names of some images that show it"""
    effect_in_words: str = ""
    """What it may do to the accuracy, if that cannot be said in points; they still order the doubts"""

    @property
    def effect(self) -> str:
        """What it may do to the accuracy, in words."""
        if self.effect_in_words:
            return self.effect_in_words
        if self.points is None:
            return "Perhaps too high"
        direction = "high" if self.points >= 0 else "low"
        return f"Up to {abs(self.points):.1f} points too {direction}"

    def words(self, advice: bool = True) -> str:
        """Return effect, sentence and advice as one line. `advice`: whether to add what to do."""
        line = f"{self.effect}: {self.sentence}."
        if not (advice and self.advice):
            return line
        return f"{line} {self.advice}" if self.advice.endswith("?") else f"{line} {self.advice}."
