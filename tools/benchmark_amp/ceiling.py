"""The most that a device could do: the model's own operations, counted, against what the device is capable of."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tools.benchmark_amp.frame import Found, middle, precision_of
from utils.config import AmpConfig, Config

if TYPE_CHECKING:
    import torch

    from engine.amp.precision import Precision
    from engine.measure.mfu import Peak


_peaks: dict[tuple[str, str, int], Peak | None] = {}
"""By kind, device and threads: measured once a process."""


def ceiling(config: Config, device: torch.device, precisions: Iterable[AmpConfig]) -> dict[str, Any]:
    """GFLOP of an image in training, and TFLOP/s of the device in each precision: listed, or measured here."""
    import torch

    from engine.amp.precision import Precision
    from engine.measure.mfu import training_flops
    from models import build_without_weights

    size, channels = config.DATA.IMAGE_SIZE, config.DATA.IMAGE_CHANNELS
    flops = training_flops(build_without_weights(config.MODEL, size, channels), channels, size)
    peaks: dict[str, Any] = {}
    for amp in precisions:
        precision = Precision(amp, device)
        kind = precision.name.split("-")[-1]
        if kind not in peaks and (peak := _peak(kind, precision)) is not None:
            peaks[kind] = {"tflops": peak.tflops, "how": peak.how}
    if device.type == "cuda":
        torch.cuda.empty_cache()  # what is measured next may need all of it
    return {"gflop_per_image": flops / 1e9 if flops else None, "peaks": peaks}


def _peak(kind: str, precision: Precision) -> Peak | None:
    import torch

    from engine.measure.mfu import peak_of

    threads = torch.get_num_threads()
    key = kind, str(precision.device), threads
    if key not in _peaks:
        _peaks[key] = peak_of(precision, threads, True, Path("-"))  # no run to remember it
    return _peaks[key]


def of_peak(found: Found, name: str) -> str:
    """What a contender uses of the device, in percent."""
    speed, kind = middle(found, name, "images_per_second"), precision_of(found, name).split()[-1]
    gflop, peak = found["ceiling"]["gflop_per_image"], found["ceiling"]["peaks"].get(kind)
    if speed is None or gflop is None or peak is None:
        return "-"
    return f"{100 * gflop * speed / 1000 / peak['tflops']:.0f} %"


def ceiling_line(found: Found) -> str:
    gflop, peaks = found["ceiling"]["gflop_per_image"], found["ceiling"]["peaks"]
    if gflop is None or not peaks:
        return "of peak: not known for this model or device"
    told = ", ".join(
        f"{peak['tflops']:.3g} in {kind}, so {1000 * peak['tflops'] / gflop:.3g} images/s"
        for kind, peak in peaks.items()
    )
    how = "; ".join(dict.fromkeys(peak["how"] for peak in peaks.values()))
    return f"of peak: an image is {gflop:.3g} GFLOP in training, counted; the device has TFLOP/s ({how}): {told}"
