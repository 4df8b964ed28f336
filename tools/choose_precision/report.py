"""Report of choose_precision.py: the table for the terminal, and the contents of choose_precision.json."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

from tools.choose_precision.layers import Layer
from tools.choose_precision.measure import Measured
from tools.choose_precision.verdict import SMOOTHED_OVER, Baseline, Finding
from tools.common.tables import in_columns

SHOWN_LAYERS = 3

Row = tuple[str, ...]
HEADINGS: Row = (
    "mode", "images/s", "speed", "memory", "of fp32's", "loss", "two seeds", "skipped", "underflow", "headroom"
)  # fmt: skip


def table(findings: list[Finding], base: Baseline | None) -> str:
    """One row per mode. `loss`: largest difference from fp32's curve; `two seeds`: that of two fp32 curves."""
    return "\n".join(in_columns([HEADINGS, *([_fp32(base)] if base else []), *map(_row, findings)]))


def _fp32(base: Baseline) -> Row:
    speed, memory = _speed(base.images_per_second, 1.0), _memory(base.peak_memory_gb, 1.0)
    return ("fp32", *speed, *memory, "-", _small(base.seed_noise(len(base.losses))), *_blank(3))


def _row(finding: Finding) -> Row:
    measured = finding.measured
    if measured.failed:
        return (finding.name, *_blank(9))
    return (
        finding.name,
        *_speed(measured.images_per_second, finding.speed),
        *_memory(measured.peak_memory_gb, finding.memory),
        _small(finding.difference),
        _small(finding.noise),
        f"{measured.skipped}/{len(measured.losses)}",
        _percent(max((layer.underflow_share for layer in measured.layers), default=None)),
        _power(min((layer.headroom for layer in measured.layers), default=None)),
    )


def details(findings: list[Finding]) -> list[str]:
    """Lines below the table: the layers that lose most, notes, and why a mode is not recommended."""
    lines: list[str] = []
    for finding in findings:
        texts = [*_layer_lines(finding.measured), *finding.measured.notes]
        texts += [f"not recommended: {reason}" for reason in finding.against]
        lines += [f"{finding.name}: {text}" for text in texts]
    return lines


def _layer_lines(measured: Measured) -> list[str]:
    worst = sorted(measured.layers, key=lambda layer: layer.underflow_share, reverse=True)[:SHOWN_LAYERS]
    worst = [layer for layer in worst if layer.underflows]
    lines = []
    if worst:
        fractions = ", ".join(f"{layer.name} {_percent(layer.underflow_share)} ({layer.dtype})" for layer in worst)
        lines.append(f"layers whose gradients underflow most, at scale {measured.scale:g}: {fractions}")
    tightest = min(measured.layers, key=lambda layer: layer.headroom, default=None)
    if tightest is not None and tightest.headroom < 2**15:
        lines.append(
            f"at scale {measured.scale:g}, {tightest.name} is closest to overflow: its gradients could be "
            f"{_power(tightest.headroom)} times as large without overflow"
        )
    return lines


def _speed(images: float, ratio: float | None) -> Row:
    return rounded(images), "-" if ratio is None else f"{ratio:.2f}x"


def rounded(images: float) -> str:
    return f"{images:,.0f}" if images >= 100 else f"{images:.3g}"


def _memory(gigabytes: float, fraction: float | None) -> Row:
    return f"{gigabytes:.2f} GB", "-" if fraction is None else f"{100 * fraction:.0f} %"


def _blank(columns: int) -> Row:
    return ("-",) * columns


def _small(value: float | None) -> str:
    if value is None or math.isnan(value):
        return "-"
    return "not a number" if math.isinf(value) else f"{value:.2g}"


def _percent(fraction: float | None) -> str:
    return "-" if fraction is None else f"{100 * fraction:.2g} %"


def _power(headroom: float | None) -> str:
    if headroom is None:
        return "-"
    return "any" if math.isinf(headroom) else f"2^{math.floor(math.log2(headroom))}"


def as_json(findings: list[Finding], base: Baseline | None) -> dict[str, Any]:
    """All metrics and loss curves as plain values."""
    modes = []
    for finding in findings:
        one = asdict(finding)
        measured = {**one.pop("measured"), "layers": [_layer(layer) for layer in finding.measured.layers]}
        modes.append({**one, **measured})
    fp32 = None
    if base is not None:
        fp32 = {
            "images_per_second": base.images_per_second,
            "speed_noise": base.speed_noise,
            "seed_noise": base.seed_noise(len(base.losses)),
            "runs": [asdict(run) for run in base.runs],
        }
    return _plain({"fp32": fp32, "modes": modes, "smoothed_over": f"1/{SMOOTHED_OVER} of the updates"})


def _layer(layer: Layer) -> dict[str, Any]:
    return {**asdict(layer), "underflow_share": layer.underflow_share}


def _plain(value: Any) -> Any:
    """Replace infinity and NaN, which JSON does not have."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
