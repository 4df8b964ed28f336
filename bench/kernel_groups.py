"""Group the kernels of an update by what they do, and compute what perfect kernels would take.

The kernels are read from a trace of torch's profiler in Chrome's format. Each has the operators and the named ranges
around its launch, and by them its group, its shapes and its work; where they are missing, its name gives the group.
"""

from __future__ import annotations

import gzip
import json
import math
import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

# Groups of kernels
PRODUCTS = "matrix products"
FORWARD = "attention forward"
BACKWARD = "attention backward"
POINTWISE = "pointwise and norms"
OPTIMISER = "optimiser"
EMA = "EMA"
CLIPPING = "gradient clipping"
LOSS = "loss"
METRICS = "metrics"
COPIES = "copies and casts"
OTHER = "other"

RANGES = (
    ("Optimizer.", OPTIMISER),  # torch's own; profile_update.py adds the others
    ("update.clip_gradients", CLIPPING),
    ("Ema.", EMA),
    ("TrainMeters.", METRICS),
)
"""Beginning of a range's name, and the group of all kernels that are launched in it."""
FACTORS = {"aten::mm": 0, "aten::bmm": 0, "aten::addmm": 1, "aten::baddbmm": 1, "aten::_addmm_activation": 1}
"""Operators that are matrix products, and the number of their inputs before the two factors."""
ATTENTION = {
    "vitamp::packed_attention": (FORWARD, 3),
    "vitamp::packed_attention_backward": (BACKWARD, 1),
    "aten::_scaled_dot_product_flash_attention": (FORWARD, 1),
    "aten::_scaled_dot_product_flash_attention_backward": (BACKWARD, 1),
    "aten::_scaled_dot_product_efficient_attention": (FORWARD, 1),
    "aten::_scaled_dot_product_efficient_attention_backward": (BACKWARD, 1),
    "aten::_scaled_dot_product_cudnn_attention": (FORWARD, 1),
    "aten::_scaled_dot_product_cudnn_attention_backward": (BACKWARD, 1),
}
"""Operators of attention, their group, and how many tensors as large as the queries their first input holds."""
GELU = {"vitamp::gelu_with_bias": 2, "vitamp::gelu_with_bias_backward": 3}
"""Operators of GELU, and the number of tensors as large as their first input that they read and write."""
NAMES = (
    (LOSS, r"nll_loss|log_softmax|cross_entropy"),
    (POINTWISE, r"^triton_|## Call CompiledFxGraph"),
    (BACKWARD, r"flash_bwd|flash_bprop|fmha_cutlassB|dot_do_o"),
    (FORWARD, r"flash_fwd|flash_fprop|fmha_cutlassF"),
    (OPTIMISER, r"FusedAdam|FusedOptimizer|_fused_adam"),
    (EMA, r"[Ll]erp"),
    (CLIPPING, r"LpNorm|lpnorm_cleanup|_foreach_norm"),
    (PRODUCTS, r"nvjet|gemm|cutlass|splitKreduce"),
    (COPIES, r"^Memcpy|^Memset|copy_|CatArray|aten::cat"),
    (POINTWISE, r"elementwise|layer_norm|GammaBeta|reduce_kernel"),
    (POINTWISE, r"^aten::(add|mul|div|sum|gelu|_softmax)"),
)
"""Groups of kernels without a telling range or operator, and what their names contain; the first match counts."""
BYTES_PER_PARAMETER = {OPTIMISER: 4 * 7, EMA: 4 * 3, CLIPPING: 4 * 3}
"""Bytes that must be moved for each parameter, all in fp32. AdamW reads four numbers (weight, gradient and its two
averages) and writes three; the EMA reads two and writes one; clipping reads the gradients twice and writes them."""
VALUE_BYTES = {
    "c10::BFloat16": 2,
    "c10::Half": 2,
    "float": 4,
    "double": 8,
    "long int": 8,
    "int": 4,
    "bool": 1,
    "unsigned char": 1,
    "signed char": 1,
}
"""Bytes per value, by the name of the dtype in a trace."""
HALVES = ("c10::BFloat16", "c10::Half")


class Peaks(NamedTuple):
    """What a GPU can do at most."""

    flops: float
    """Floating-point operations per second in matrix products of half precision"""
    bandwidth: float
    """Bytes per second from and to its memory"""


H200 = Peaks(flops=989e12, bandwidth=4.8e12)
"""Data sheet of the NVIDIA H200 SXM: bf16 and fp16 without sparsity (the sheet has twice that, with it), and HBM3e."""


class Operator(NamedTuple):
    """A call of an operator, or a named range of the program, around the launch of a kernel."""

    name: str
    shapes: list[Any] = []  # noqa: RUF012 - never changed
    """Of its inputs; [] for one that is not a tensor"""
    types: list[str] = []  # noqa: RUF012 - never changed
    call: int = 0
    """Number that no other call has"""


class Record(NamedTuple):
    """A kernel, a copy or a memset on the device. Times are in microseconds."""

    name: str
    operators: tuple[Operator, ...]
    """Around its launch, the innermost first; empty if unknown"""
    start: float
    duration: float
    stream: int


class Work(NamedTuple):
    """What a call has to do, and the seconds in which a perfect kernel does it; None: unknown."""

    flops: float | None = None
    bytes: float | None = None
    seconds: float | None = None


@dataclass
class Row:
    """Kernels of one kind, with numbers per update."""

    group: str
    what: str
    """Shape of the product, or name of the operator or kernel; '' for all of the group"""
    ms: float = 0.0
    calls: float = 0.0
    """Calls of the operator; kernels, where a range makes the group"""
    share: float = 0.0
    """Fraction of the update's time"""
    flops: float | None = 0.0
    bytes: float | None = 0.0
    perfect_ms: float | None = 0.0
    saves_ms: float | None = None
    """Time that perfect kernels would save"""
    percent_of_peak: float | None = None
    kernels: dict[str, float] = field(default_factory=dict)
    """Name of a kernel -> its milliseconds"""


class Span(NamedTuple):
    """An event on the host: an operator, a range, or the launch of a kernel."""

    event: dict[str, Any]
    operators: tuple[Operator, ...]
    """Itself and those around it, the innermost first"""
    inside: list[tuple[float, float]]
    """Intervals of the events directly inside it"""

    @property
    def end(self) -> float:
        return self.event["ts"] + self.event["dur"]


ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
LAUNCHES = ("cuda_runtime", "cuda_driver")
ON_HOST = ("cpu_op", "user_annotation", *LAUNCHES)
"""Categories of events in a trace"""
CLOCK = 0.002
"""Microseconds by which an event may seem to end too late: traces are written in nanoseconds, and rounded."""


def read_trace(path: Path, of_gpu: bool) -> list[Record]:
    """Read the kernels of a GPU, or the operators of a CPU, from a trace of torch's profiler."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return records_of(json.load(file)["traceEvents"], of_gpu)


def records_of(events: list[dict[str, Any]], of_gpu: bool) -> list[Record]:
    """Return the GPU's events, each with the operators around its launch; or the operators of the CPU."""
    timed = [event for event in events if "dur" in event]
    spans = nested([event for event in timed if event.get("cat") in ON_HOST])
    if not of_gpu:
        return operators_alone(spans)
    on_device = [event for event in timed if event.get("cat") in ON_DEVICE]
    if not on_device:
        raise ValueError("the trace has no kernels: the profiler could not record the GPU")
    # A kernel has the correlation of its launch. Should the launch be missing, the kernel also has the id of the
    # innermost operator.
    of_launch: dict[int, tuple[Operator, ...]] = {}
    of_operator: dict[int, tuple[Operator, ...]] = {}
    for span in spans:
        about = span.event.get("args", {})
        if span.event["cat"] in LAUNCHES:
            of_launch[about.get("correlation", 0)] = span.operators[1:]
        elif span.event["cat"] == "cpu_op":
            of_operator[about.get("External id", 0)] = span.operators
    records = []
    for event in on_device:
        about = event["args"]
        around = of_launch.get(about.get("correlation", -1)) or of_operator.get(about.get("External id", -1), ())
        records.append(Record(event["name"], around, event["ts"], event["dur"], about.get("stream", 0)))
    return records


def nested(events: list[dict[str, Any]]) -> list[Span]:
    """Find, for each event of the host, the events of its thread around it and inside it."""
    spans: list[Span] = []
    running: dict[tuple[int, int], list[Span]] = defaultdict(list)
    for call, event in enumerate(sorted(events, key=lambda event: (event["ts"], -event["dur"]))):
        start = event["ts"]
        stack = running[event["pid"], event["tid"]]
        while stack and stack[-1].end < start + CLOCK:
            stack.pop()
        about = event.get("args", {})
        operator = Operator(event["name"], about.get("Input Dims", []), about.get("Input type", []), call)
        span = Span(event, (operator,), [])
        if stack:
            stack[-1].inside.append((start, span.end))
            span = span._replace(operators=(operator, *stack[-1].operators))
        stack.append(span)
        spans.append(span)
    return spans


def operators_alone(spans: list[Span]) -> list[Record]:
    """Return the time of each operator of the CPU without that of the operators inside it, in one record or several.

    A range of the program is none of them, except a compiled graph, whose loops are no operators.
    """
    records = []
    for span in spans:
        name = span.event["name"]
        if span.event["cat"] == "cpu_op" or "CompiledFxGraph" in name:
            for start, end in idle(span.inside, span.event["ts"], span.end):
                records.append(Record(name, span.operators, start, end - start, span.event["tid"]))
    return records


def idle(busy: Iterable[tuple[float, float]], start: float, end: float) -> list[tuple[float, float]]:
    """Return the intervals between `start` and `end` that none of the intervals `busy`, which may overlap, covers."""
    found = []
    reached = start
    for one_start, one_end in sorted(busy):
        if one_start > reached:
            found.append((reached, min(one_start, end)))
        reached = max(reached, one_end)
    if end > reached:
        found.append((reached, end))
    return found


def grouped(records: list[Record], updates: int, parameters: int, peaks: Peaks | None) -> dict[str, Any]:
    """Group the kernels of so many updates. Returns the entries of a model in profile.json.

    `parameters`: their number in the model. `peaks`: those of the device; None: unknown.
    """
    rows: dict[tuple[str, str], Row] = {}
    seen: set[int] = set()
    for record in records:
        group, what, operator = place(record)
        row = rows.setdefault((group, what), Row(group, what))
        ms = record.duration / 1000 / updates
        row.ms += ms
        row.kernels[record.name] = row.kernels.get(record.name, 0.0) + ms
        if operator is not None and operator.call in seen:
            continue  # a further kernel of the same call, whose work is counted already
        row.calls += 1 / updates
        work = Work() if operator is None else work_of(operator, peaks)
        if operator is not None:
            seen.add(operator.call)
        row.flops = plus(row.flops, work.flops, 1 / updates)
        row.bytes = plus(row.bytes, work.bytes, 1 / updates)
        row.perfect_ms = plus(row.perfect_ms, work.seconds, 1000 / updates)

    start = min(record.start for record in records)
    end = max(record.start + record.duration for record in records)
    span_ms = (end - start) / 1000 / updates
    gaps = idle([(record.start, record.start + record.duration) for record in records], start, end)
    gap_ms = sum(until - since for since, until in gaps) / 1000 / updates
    for row in rows.values():
        if row.group in BYTES_PER_PARAMETER:
            row.bytes = float(BYTES_PER_PARAMETER[row.group] * parameters)
            row.perfect_ms = None if peaks is None else 1000 * row.bytes / peaks.bandwidth
        finish(row, span_ms, peaks)
    ordered = sorted(rows.values(), key=lambda row: -row.ms)
    groups = [summary(group, ordered, span_ms, peaks) for group in dict.fromkeys(row.group for row in ordered)]
    groups.sort(key=lambda group: -group.ms)
    entry: dict[str, Any] = {
        "ms": span_ms,
        "gap_ms": gap_ms,
        "overlap_ms": sum(row.ms for row in ordered) - (span_ms - gap_ms),
        "percent_of_peak": None,
        "groups": [asdict(group) for group in groups],
        "rows": [asdict(row) for row in ordered],
    }
    if peaks is not None:
        flops = sum(group.flops for group in groups if group.flops is not None)
        entry["percent_of_peak"] = 100 * flops / (span_ms / 1000) / peaks.flops
    return entry


def place(record: Record) -> tuple[str, str, Operator | None]:
    """Return the group of a kernel, what it is there, and the operator whose work it does; None: not counted by call.

    The range decides, then the operator, then the name.
    """
    for operator in record.operators:
        for beginning, group in RANGES:
            if operator.name.startswith(beginning):
                return group, "", None
    for operator in record.operators:
        if operator.name in FACTORS:
            return PRODUCTS, shape_in_words(operator), operator
        if operator.name in ATTENTION:
            return ATTENTION[operator.name][0], operator.name, operator
        if operator.name in GELU:
            return POINTWISE, operator.name, operator
    group = next((group for group, pattern in NAMES if re.search(pattern, record.name)), OTHER)
    if group in BYTES_PER_PARAMETER:
        return group, "", None
    innermost = record.operators[0] if record.operators else None
    if record.name.startswith("triton_"):
        return group, re.sub(r"_\d+$", "", record.name), innermost  # without the number in its graph
    if group == PRODUCTS:
        return group, "shape unknown", innermost
    name = record.name if innermost is None or record.name.startswith("Mem") else innermost.name
    without_parameters = re.sub(r"[<(].*", "", name.removeprefix("void ").replace("(anonymous namespace)::", ""))
    return group, without_parameters.strip(), innermost


def product(operator: Operator) -> tuple[int, int, int, int] | None:
    """Return how many products, and m, n and k: m x k matrices times k x n matrices. None if the trace lacks shapes."""
    first = FACTORS[operator.name]
    factors = operator.shapes[first : first + 2]
    if len(factors) < 2 or len(factors[0]) < 2:
        return None
    *batch, m, k = factors[0]
    return math.prod(batch), m, factors[1][-1], k


def shape_in_words(operator: Operator) -> str:
    sizes = product(operator)
    if sizes is None:
        return "shape unknown"
    number, m, n, k = sizes
    shape = f"{m} x {n} x {k}"
    return shape if number == 1 else f"{number} of {shape}"


def work_of(operator: Operator, peaks: Peaks | None) -> Work:
    """Return the floating-point operations and bytes of a call, and its shortest time on a device with these peaks.

    Products and attention have their inputs and outputs moved once, without biases and logsumexp. A backward pass of
    attention computes the scores anew: five products, where the forward pass has two. Kernels of torch's compiler have
    every operand moved once; if they write one in place, it is moved twice in truth.
    """
    if not operator.shapes or not operator.types:
        return Work()
    flops = None
    moved = None  # bytes
    value_bytes = VALUE_BYTES.get(operator.types[0])
    if operator.name in FACTORS and (sizes := product(operator)) is not None:
        number, m, n, k = sizes
        flops = 2.0 * number * m * n * k
        moved = times(number * (m * k + k * n + m * n), value_bytes)
    elif operator.name in ATTENTION:
        group, queries_in_first = ATTENTION[operator.name]
        values = math.prod(operator.shapes[0]) // queries_in_first
        tokens = operator.shapes[0][-2]
        products = 2 if group == FORWARD else 5
        tensors = 4 if group == FORWARD else 8
        flops = 2.0 * products * values * tokens
        moved = times(tensors * values, value_bytes)
    elif operator.name in GELU:
        moved = times(GELU[operator.name] * math.prod(operator.shapes[0]), value_bytes)
    elif operator.name.startswith("triton_"):
        moved = 0.0
        for shape, dtype in zip(operator.shapes, operator.types, strict=False):
            if dtype in VALUE_BYTES:  # others are numbers
                moved += math.prod(shape) * VALUE_BYTES[dtype]
    seconds = None
    has_peak = flops is None or operator.types[0] in HALVES
    if peaks is not None and moved is not None and has_peak:
        seconds = max((flops or 0.0) / peaks.flops, moved / peaks.bandwidth)
    return Work(flops, moved, seconds)


def times(number: float, value: float | None) -> float | None:
    return None if value is None else number * value


def plus(total: float | None, value: float | None, factor: float) -> float | None:
    """Add `factor` times `value`; what is unknown makes the total unknown."""
    return None if total is None or value is None else total + factor * value


def finish(row: Row, span_ms: float, peaks: Peaks | None) -> None:
    """Set what follows from the time and the work of a row."""
    row.share = row.ms / span_ms
    if row.perfect_ms is not None:
        row.saves_ms = max(0.0, row.ms - row.perfect_ms)
    if peaks is not None and row.flops and row.ms:
        row.percent_of_peak = 100 * row.flops / (row.ms / 1000) / peaks.flops


def summary(group: str, rows: list[Row], span_ms: float, peaks: Peaks | None) -> Row:
    """Add up a group. Its work and savings are those of the rows where they are known."""
    own = [row for row in rows if row.group == group]
    total = Row(group, "", sum(row.ms for row in own), sum(row.calls for row in own))
    total.share = total.ms / span_ms
    for key in ("flops", "bytes", "perfect_ms", "saves_ms"):
        known = [getattr(row, key) for row in own if getattr(row, key) is not None]
        setattr(total, key, sum(known) if known else None)
    counted_ms = sum(row.ms for row in own if row.flops)
    if peaks is not None and total.flops:
        total.percent_of_peak = 100 * total.flops / (counted_ms / 1000) / peaks.flops
    return total
