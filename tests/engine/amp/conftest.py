"""What tests of mixed precision share."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import torch

from utils.log import log


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.LogCaptureFixture]:
    monkeypatch.setattr(log, "propagate", True)
    with caplog.at_level(logging.INFO, "vitamp"):
        yield caplog


@pytest.fixture
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
