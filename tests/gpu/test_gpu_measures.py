"""What a run measures of itself on a GPU: the stages of an update by events, memory, and a trace."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from engine.measure.throughput import STAGES
from tests.gpu.runs import UPDATES, Train, on_a_gpu_alone

pytestmark = on_a_gpu_alone

LARGER = ("MODEL.EMBED_DIM=256", "MODEL.DEPTH=6", "MODEL.NUM_HEADS=4", "DATA.BATCH_SIZE=96")


@pytest.mark.timing
def test_the_stages_make_up_an_update(train: Train) -> None:
    """Work enough for the GPU to be the slower one, so that its time is the update's."""
    words = ("-amp", "bf16", "REPORT_STAGES=true", "REPORT_FREQ=5", "TRAIN.NUM_EPOCHS=5", "VALIDATE_FREQ=5")
    run = train("run", *words, *LARGER, updates=60)
    settled = run.perf[2:]
    assert all(f"{stage}_ms" in perf for perf in settled for stage in STAGES)
    for perf in settled:
        by_stage = {stage: perf[f"{stage}_ms"] for stage in STAGES}
        assert min(by_stage.values()) >= 0, by_stage
        assert min(by_stage[stage] for stage in ("forward", "backward", "optimiser")) > 0.01, by_stage
    told = sorted(sum(perf[f"{stage}_ms"] for stage in STAGES) for perf in settled)[len(settled) // 2]
    by_the_clock = sorted(96e3 / perf["images_per_second"] for perf in settled)[len(settled) // 2]
    assert told == pytest.approx(by_the_clock, rel=0.3)
    assert "Stages: data " in run.text


def test_the_peak_of_memory_is_the_tensors(train: Train) -> None:
    small, large = (train(f"b{batch}", *LARGER, f"DATA.BATCH_SIZE={batch}", updates=3) for batch in (32, 256))
    peaks = [run.perf[-1]["peak_memory_gb"] for run in (small, large)]
    assert 0.01 < peaks[0] < peaks[1] / 2
    assert f"Mem: {peaks[1]:.2f}GB" in large.text


def test_a_trace_holds_the_gpus_kernels(train: Train, tmp_path: Path) -> None:
    run = train("run", "-amp", "bf16", "-profile", 3, updates=UPDATES)
    assert "Profile written to" in run.text
    events = json.loads((tmp_path / "run" / "profile.json").read_text(encoding="utf-8"))["traceEvents"]
    kernels = [event for event in events if event.get("cat") == "kernel"]
    assert len(kernels) > 100
    assert any("adam" in event["name"].lower() for event in kernels), "the fused optimiser's"
    assert sum(event.get("name", "").startswith("ProfilerStep#") and event["ph"] == "X" for event in events) >= 3
