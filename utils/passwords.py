"""Hides passwords in URLs before anything is written for people or for other programs."""

from __future__ import annotations

import json
import re
from typing import Any

HIDDEN = "***"
_USER = re.compile(r"(?<=://)[^/\s@'\"]+@")
_SIGNED = re.compile(
    r"(://[^\s?'\"]+)\?[^\s'\"]*(?:sig|token|key|credential|secret|password|auth)[^\s'\"]*", re.IGNORECASE
)
"""A URL whose query has a signature or a token."""


def redacted(text: str) -> str:
    """Text whose URLs have *** in place of user:password and of signed queries."""
    return _SIGNED.sub(rf"\1?{HIDDEN}", _USER.sub(f"{HIDDEN}@", text)) if "://" in text else text


def redacted_values(values: dict[str, Any]) -> dict[str, Any]:
    """Values that JSON can hold, as JSON gives them back, with `redacted` texts."""
    return json.loads(redacted(json.dumps(values)))


def is_redacted(url: str) -> bool:
    return f"://{HIDDEN}@" in url or url.endswith(f"?{HIDDEN}")
