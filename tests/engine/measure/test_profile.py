"""-profile: the number of updates a trace needs."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from engine.measure.stages import profiled


@pytest.mark.parametrize(("updates", "written"), [(4, False), (6, True)])
def test_a_run_too_short_for_a_trace_is_told_how_many_updates_it_needs(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, updates: int, written: bool
) -> None:
    monkeypatch.setattr(logging.getLogger("vitamp"), "propagate", True)
    with profiled(2, tmp_path) as step:
        for _ in range(updates):
            step()
    assert (tmp_path / "profile.json").exists() == written
    assert ("the run ended before 6 updates; no trace was written" in caplog.text) != written
