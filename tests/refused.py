"""What a call is refused with."""

from collections.abc import Callable
from typing import Any

import pytest

from utils.errors import UserError


def refusal(call: Callable[..., object], *given: object, by: type[Exception] = UserError, **named: Any) -> str:
    """The words of the error that a call raises."""
    with pytest.raises(by) as caught:
        call(*given, **named)
    return str(caught.value)
