#!/usr/bin/env python3
"""Profile an update of ViTs: which kernels take its time, and what perfect kernels would save.

    python bench/profile_update.py small:512 base:256 large:128 -device cuda -out on_gpu
    python bench/profile_update.py base:256 -image_size 32 -updates 2 -device cpu -out on_gpu
    python bench/profile_update.py base:256 -from_traces -out on_gpu    # group kept traces again, without training

The update is that of `ours` in `scripts/benchmark_amp.py timm`, in bf16: AdamW, EMA, clipping at norm 1, no dropout,
images on the device. It is compiled on a GPU and eager on a CPU, where compiling takes minutes. Each model is trained
in a process of its own: first timed without the profiler, then recorded with it.

A group of kernels has its time per update, its work, and the time of a perfect kernel, which computes at the peak or
moves each operand once at full bandwidth, whichever takes longer. It does the work of the kernels that there are: to
fuse them would save more. Unknown is `-`, in JSON null. Without a GPU the operators take the place of kernels, each
without the operators that it calls; peaks are then unknown. The percentage of the peak of a whole update counts all
that its products and its attention compute, also scores that the backward pass computes anew.

-out gets profile.json, and the trace of each model for chrome://tracing. More on measuring: docs/benchmarks.md.
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from collections import defaultdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.benchmark_amp.command import TIMM_FIXED
from bench.benchmark_amp.loops import LoopSession
from bench.benchmark_amp.plan import OURS, Way, set_up
from bench.benchmark_amp.sessions import Metrics, Worker
from bench.kernel_groups import (
    BACKWARD,
    CLIPPING,
    COPIES,
    EMA,
    FORWARD,
    H200,
    LOSS,
    METRICS,
    OPTIMISER,
    OTHER,
    POINTWISE,
    PRODUCTS,
    grouped,
    read_trace,
)
from tools.common.command_line import PAGES, Tool, ToolLine, tool
from tools.common.tables import in_columns, non_defaults
from utils.config import Config
from utils.errors import EXIT_DONE, EXIT_FAILED, UserError
from utils.flags import Flag, Positional, whole
from utils.log import log
from utils.record.run_folder import git_state, versions, write_json

if TYPE_CHECKING:
    from engine.update import TrainState

NAME = "profile_update.py"
PAGES[NAME] = "benchmarks"
MODELS = Positional("models", "SIZE:BATCH", "ViTs with patches of 16 pixels, and their batch sizes", nargs="+")
OWN = (
    Flag("out", "folder for profile.json and the traces", "DIR", default="."),
    Flag("updates", "recorded updates per model", "N", default=10, kind=whole(1)),
    Flag("from_traces", "train nothing: group the traces in -out again"),
)
TOOL = Tool(NAME, __doc__, OWN, places=(MODELS,), folder="bench")
WARMUP = 2
"""Updates with the profiler before the recorded ones: it initialises itself in the first."""
SMALL = 0.005
"""Rows below this fraction of the update are one row in the log."""


def sentence(entry: dict[str, Any]) -> str:
    """Say in one sentence where the time of an update goes."""
    ms: dict[str, float] = defaultdict(float)
    peak: dict[str, float | None] = {}
    for row in entry["groups"]:
        ms[row["group"]] = row["ms"]
        peak[row["group"]] = row["percent_of_peak"]
    parts = [f"{ms[PRODUCTS]:.1f} are matrix products{of_peak(peak.get(PRODUCTS))}"]
    halves = []
    for group, word in ((FORWARD, "forward"), (BACKWARD, "backward")):
        if group in peak:
            percent = peak[group]
            at = "" if percent is None else f" at {percent:.0f} %"
            halves.append(f"{word} {ms[group]:.1f}{at}")
    if halves:
        parts.append(f"{ms[FORWARD] + ms[BACKWARD]:.1f} attention ({', '.join(halves)})")
    parts.append(f"{ms[POINTWISE]:.1f} pointwise and norms")
    parts.append(f"{ms[OPTIMISER] + ms[EMA] + ms[CLIPPING]:.1f} optimiser, EMA and clipping")
    parts.append(f"{ms[LOSS] + ms[METRICS] + ms[COPIES] + ms[OTHER]:.1f} loss, metrics, copies and others")
    parts.append(f"{entry['gap_ms']:.1f} gaps")
    known = [row["saves_ms"] for row in entry["groups"] if row["saves_ms"] is not None]
    saving = "; peaks of this device are unknown"
    if known:
        saving = f"; perfect kernels would save {sum(known):.1f} ms where the bound is known"
    whole_update = f"{entry['ms']:.1f} ms an update{of_peak(entry['percent_of_peak'])}"
    return f"Of {whole_update}, {', '.join(parts)}{saving}."


def of_peak(percent: float | None) -> str:
    return "" if percent is None else f" ({percent:.0f} % of the peak)"


def table(entry: dict[str, Any]) -> list[str]:
    """Return the lines of a table: each group, and in it the rows that are not small."""
    shown = [["", "ms", "calls", "share", "TFLOP", "of peak", "GB", "perfect ms", "saves ms"]]
    for group in entry["groups"]:
        shown.append(cells(group["group"], group))
        own = [row for row in entry["rows"] if row["group"] == group["group"] and row["what"]]
        large = [row for row in own if row["share"] >= SMALL]
        shown += [cells(f"  {row['what'][:60]}", row) for row in large]
        rest = [row for row in own if row["share"] < SMALL]
        if rest and large:
            ms = sum(row["ms"] for row in rest)
            shown.append([f"  {len(rest)} smaller", f"{ms:.2f}", "", "", "", "", "", "", ""])
    gap_ms = entry["gap_ms"]
    shown.append(["gaps", f"{gap_ms:.2f}", "", f"{100 * gap_ms / entry['ms']:.1f} %", "", "", "", "0", f"{gap_ms:.2f}"])
    lines = in_columns(shown)
    if entry["overlap_ms"] > SMALL * entry["ms"]:
        lines.append(f"  for {entry['overlap_ms']:.2f} ms kernels overlapped, so the rows are more than the update")
    return lines


def cells(title: str, row: dict[str, Any]) -> list[str]:
    def number(key: str, factor: float, form: str) -> str:
        return "-" if row[key] is None else format(factor * row[key], form)

    peak = "-" if row["percent_of_peak"] is None else f"{row['percent_of_peak']:.0f} %"
    return [
        title,
        number("ms", 1, ".2f"),
        number("calls", 1, ".4g"),
        f"{100 * row['share']:.1f} %",
        number("flops", 1e-12, ".3g"),
        peak,
        number("bytes", 1e-9, ".3g"),
        number("perfect_ms", 1, ".2f"),
        number("saves_ms", 1, ".2f"),
    ]


class ProfileSession(LoopSession):
    """The training of main_single_gpu.py, as benchmark_amp.py measures it; a turn also records a trace."""

    def __init__(self, compiled: bool, config: Config, updates: int, trace: Path) -> None:
        super().__init__(Way(OURS, "bf16", compiled), config, updates)
        self._trace = trace

    def turn(self) -> Metrics:
        from torch.profiler import ProfilerActivity, profile, schedule

        from engine.machine.device import synchronize

        unprofiled = super().turn()
        parts = self._loop.parts  # pyright: ignore[reportAttributeAccessIssue]  # it is Ours
        name_ranges(parts)
        kinds = [ProfilerActivity.CPU]
        if self._device.type == "cuda":
            kinds.append(ProfilerActivity.CUDA)
        recording = profile(
            activities=kinds,
            record_shapes=True,
            schedule=schedule(wait=0, warmup=WARMUP, active=self._updates, repeat=1),
            on_trace_ready=lambda profiler: profiler.export_chrome_trace(str(self._trace)),
        )
        with recording:
            for nth, batch in enumerate(itertools.islice(self._batches, WARMUP + self._updates), 1):
                self._loop.train([batch])
                if nth in (WARMUP, WARMUP + self._updates):
                    synchronize(self._device)  # all kernels of the recorded updates are recorded, and no others
                recording.step()
        weights = list(parts.model.parameters())
        return {
            "unprofiled_ms": 1000 * unprofiled["seconds"] / self._updates,
            "parameters": sum(weight.numel() for weight in weights),
            **{key: unprofiled[key] for key in ("peak_memory_gb", "precision", "choices")},
        }


def name_ranges(parts: TrainState) -> None:
    """Put named ranges around parts of the update, so that the trace shows which kernels they launch."""
    from torch.profiler import record_function

    import engine.update as update

    named = [(update, "clip_gradients"), (parts.meters, "add"), (parts.meters, "close_update")]
    named += [(callback, "after_update") for callback in parts.callbacks]
    for owner, function in named:
        owner_name = "update" if owner is update else type(owner).__name__
        setattr(owner, function, record_function(f"{owner_name}.{function}")(getattr(owner, function)))


@tool
def main(argv: list[str]) -> int:
    line = TOOL.read(argv)
    out = Path(line.asked.out)
    out.mkdir(parents=True, exist_ok=True)
    path = out / "profile.json"
    if line.asked.from_traces:
        if not path.exists():
            raise UserError(f"{path}: no such file; -from_traces needs what an earlier call has written.")
        results = json.loads(path.read_text(encoding="utf-8"))
    else:
        results = {"date": time.strftime("%Y-%m-%d"), "versions": versions(), "git": git_state(), "models": {}}
    for word in line.asked.models:
        size, _, batch = word.partition(":")
        if not batch.isdecimal():
            raise UserError(f"{word}: give a size and a batch size, such as base:256.")
        name = f"vit_{size}_patch16_224"
        trace = out / f"profile_{size}.trace.json.gz"
        if not line.asked.from_traces:
            results["models"][name] = record(line, results, name, int(batch), trace)
        write_json(path, results)
        entry = results["models"][name]
        try:
            complete(entry, trace, results["device"])
        except Exception as error:  # of another torch's trace, say: the next model is still recorded
            log.exception("%s: its trace cannot be grouped", name)
            entry["not_grouped"] = f"{type(error).__name__}: {error}"
        write_json(path, results)
        show(name, entry)
    failed = any("failed" in entry or "not_grouped" in entry for entry in results["models"].values())
    return EXIT_FAILED if failed else EXIT_DONE


def complete(entry: dict[str, Any], trace: Path, device: str) -> None:
    """Add what the trace shows to a model's entry of profile.json, unless the model could not be trained."""
    if "failed" in entry:
        return
    peaks = H200 if device.startswith("cuda: NVIDIA H200,") else None  # not the H200 NVL, which is slower
    records = read_trace(trace, of_gpu=device.startswith("cuda"))
    entry |= grouped(records, entry["updates"], entry["parameters"], peaks)
    entry["sentence"] = sentence(entry)
    entry.pop("not_grouped", None)


def record(line: ToolLine, results: dict[str, Any], name: str, batch: int, trace: Path) -> dict[str, Any]:
    """Train a model and record its trace. Returns what profile.json has of it so far."""
    fixed = TIMM_FIXED | {"MODEL.NAME": name, "DATA.BATCH_SIZE": batch}
    loaded, device, results["device"], _ = set_up(line, fixed=fixed)
    compiled = device.type == "cuda"
    updates = line.asked.updates
    log.info("%s, batch %d: training and recording %d updates", name, batch, updates)
    worker = Worker(partial(ProfileSession, compiled, loaded.config, updates, trace.resolve()), [], keep=False)
    about = {"batch": batch, "updates": updates, "compiled": compiled, "settings": non_defaults(loaded.config)}
    return about | worker.turn()


def show(name: str, entry: dict[str, Any]) -> None:
    print(f"\n{name}, batch {entry['batch']}, {'compiled' if entry['compiled'] else 'eager'}")
    failed = entry.get("failed") or entry.get("not_grouped")
    if failed:
        print(f"  failed: {failed}")
        return
    print("\n".join(table(entry)))
    print(f"  {entry['unprofiled_ms']:.1f} ms an update without the profiler, {entry['ms']:.1f} with it")
    print(f"  {entry['sentence']}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
