"""Peak of the device against the counted operations of the model: the most images per second there could be."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from tools.benchmark_amp.results import Results, percent, shown
from utils.config import AmpConfig, Config

if TYPE_CHECKING:
    import torch


def ceiling(config: Config, device: torch.device, precisions: Iterable[AmpConfig]) -> dict[str, Any]:
    """GFLOP per image in training, and the device's TFLOP/s in each precision, where its data sheet is listed."""
    amps = list(precisions)
    if not amps:
        return {}
    from engine.amp.precision import Precision
    from engine.measure.mfu import DATA_SHEET, peak_of, training_flops
    from models import build_without_weights

    size, channels = config.DATA.IMAGE_SIZE, config.DATA.IMAGE_CHANNELS
    flops = training_flops(build_without_weights(config.MODEL, size, channels), channels, size)
    peaks: dict[str, Any] = {}
    for amp in amps:
        if (peak := peak_of(Precision(amp, device))) is not None:
            peaks[peak.kind] = {"tflops": peak.tflops, "how": DATA_SHEET}
    return {"gflop_per_image": flops / 1e9 if flops else None, "peaks": peaks}


def of_peak(results: Results, name: str) -> str:
    """Cell of a table: the fraction of the device's peak that a contender reaches."""
    speed, kind = results.median(name, "images_per_second"), results.precision(name).split()[-1]
    gflop, peak = results["ceiling"]["gflop_per_image"], results["ceiling"]["peaks"].get(kind)
    if speed is None or gflop is None or peak is None:
        return percent(None)
    return percent(gflop * speed / 1000 / peak["tflops"])


def peak_line(results: Results) -> str:
    """Note on where the column `of peak` comes from."""
    gflop, peaks = results["ceiling"]["gflop_per_image"], results["ceiling"]["peaks"]
    if gflop is None or not peaks:
        return "of peak: unknown for this model or device"
    each = ", ".join(
        f"{kind} {shown(peak['tflops'])} TFLOP/s ({shown(1000 * peak['tflops'] / gflop)} images/s)"
        for kind, peak in peaks.items()
    )
    how = "; ".join(dict.fromkeys(peak["how"] for peak in peaks.values()))
    return f"of peak: training takes {shown(gflop)} GFLOP per image (counted); peak of the device ({how}): {each}"
