"""Run folders with made-up metrics."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

MISCHIEF = "<script>alert('\"1\"')</script>"
VERDICT = {"bound": "compute", "text": "compute-bound: the CPU waited for data 2 % of the time."}


def make_run(
    folder: Path,
    best: float = 90.0,
    precision: str = "fp16",
    scale: float = 65536.0,
    skips: Sequence[int] = (),
    rate: str = "1e-3",
    seconds: float = 60.0,
    tag: str | None = None,
) -> Path:
    """Four epochs of 20 updates, with a report every 10. Each update in `skips` has one more skipped update."""
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(f"DATA: {{DATASET: digits}}\nTRAIN: {{NUM_EPOCHS: 4, BASE_LR: {rate}}}\n")
    about = {
        "command": "python main_single_gpu.py",
        "started": "2026-01-02T03:04:05+0000",
        "device": "cpu: a made-up one",
        "tag": tag,
        "versions": {"torch": "2.15.0"},
        "choices": {"precision": precision, "why": "as asked for", "world_size": 1},
        "samples": {"train": 100, "val": 10},
    }
    (folder / "run.json").write_text(json.dumps(about))
    lines: list[dict[str, Any]] = [{"event": "run", "epoch": 1, "what": "start", "update": 0, "perf": {}}]
    skipped = 0
    for update in range(10, 90, 10):
        epoch = (update - 1) // 20 + 1
        skipped += update in skips
        perf = {"images_per_second": 100.0 + update, "data_wait_percent": 2.0, "peak_memory_gb": 1.5}
        perf["seconds"] = seconds * update / 80
        figures = {"loss": 2 - update / 80, "acc1": update, "acc5": 99, "lr": 1e-3, "grad_norm": None}
        place = {"event": "train", "epoch": epoch, "step": update % 20, "update": update}
        lines.append({**place, **figures, "scale": scale, "skipped": skipped, "perf": perf})
        if update in skips:
            what = {"operation": "linear", "module": "blocks.0.mlp.fc1", "direction": "forward", "scale": scale}
            lines.append({"event": "skip", "epoch": epoch, "update": update, **what, "perf": {}})
        if update % 20 == 0:
            figures = {"loss": 1.0, "acc1": best - 4 + epoch, "acc5": 99.0}
            lines.append({"event": "epoch", "epoch": epoch, "update": update, **figures, "perf": {}})
            lines.append({"event": "val", "epoch": epoch, "update": update, **figures, "perf": {}})
    end = {"event": "run", "epoch": 5, "what": "end", "update": 80, "perf": {"seconds": seconds, "verdict": VERDICT}}
    text = "".join(f"{json.dumps(line)}\n" for line in [*lines, end])
    (folder / "metrics.jsonl").write_text(text)
    return folder
