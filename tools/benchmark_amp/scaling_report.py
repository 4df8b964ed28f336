"""Report of `scaling`: one table and two charts per axis."""

from __future__ import annotations

from tools.benchmark_amp.results import Results, percent, shown
from tools.common.results.section import Chart, Section

NO_EXCHANGE = ", no exchange"
TITLES = {"batch": "batch size", "image": "image size (pixels)", "model": "model (GFLOP per image)"}


def processes_name(number: int) -> str:
    return f"{number} process{'es' if number > 1 else ''}"


def sections(results: Results) -> list[Section]:
    settings = results.settings
    axes = [_axis(results, axis, names) for axis, names in settings["axes"].items()]
    return [*axes, *([_processes(results, settings["processes"])] if settings["processes"] else [])]


def _gflop(results: Results, name: str) -> float:
    """GFLOP per update."""
    work = results.settings["work"][name]
    return work["gflop_per_image"] * work["batch"]


def predicted_seconds(results: Results, name: str) -> float | None:
    """Seconds of a turn at the base size's FLOP/s."""
    base = results.settings["base"]
    seconds, gflop = results.median(base, "seconds"), _gflop(results, base)
    return seconds * _gflop(results, name) / gflop if seconds and gflop else None


def _axis(results: Results, axis: str, names: list[str]) -> Section:
    settings = results.settings
    base, updates = settings["base"], settings["iterations"]
    rows = [[TITLES[axis], "images/s", "ms/update", "work", "time", "predicted ms", "TFLOP/s", "memory (GB)"]]
    for name in names:
        work, seconds, predicted = (
            settings["work"][name],
            results.median(name, "seconds"),
            predicted_seconds(results, name),
        )
        label = f"{work['model']} ({work['gflop_per_image']:.3g})" if axis == "model" else str(work[axis])
        rows.append(
            [
                label,
                shown(results.median(name, "images_per_second")),
                shown(seconds and 1000 * seconds / updates),
                shown(_gflop(results, name) / _gflop(results, base) if _gflop(results, base) else None),
                _times(results, name, base),
                shown(predicted and 1000 * predicted / updates),
                shown(seconds and _gflop(results, name) * updates / seconds / 1000),
                shown(results.median(name, "peak_memory_gb")),
            ]
        )
    notes = [
        f"work (counted operations) and time of an update are relative to `{base}`; "
        "predicted ms assumes the FLOP/s of that size",
        results.control_line(base, "seconds"),
    ]
    return Section(f"Against {TITLES[axis]}", rows, notes)


def _times(results: Results, name: str, base: str) -> str:
    ratio = results.ratio(name, base, "seconds")
    return "-" if ratio is None else f"{ratio.median:.2f}"


def _processes(results: Results, numbers: list[int]) -> Section:
    updates, first = results.settings["iterations"], processes_name(numbers[0])
    rows = [["processes", "images/s", "ms/update", "to one", "no exchange: ms", "exchange", "memory (GB)"]]
    for number in numbers:
        name = processes_name(number)
        seconds, without = (results.median(each, "seconds") for each in (name, name + NO_EXCHANGE))
        images = results.median(name, "images_per_second")
        rows.append(
            [
                str(number),
                shown(images and number * images),
                shown(seconds and 1000 * seconds / updates),
                _times(results, name, first),
                shown(without and 1000 * without / updates),
                percent(exchange_fraction(results, name)),
                shown(results.median(name, "peak_memory_gb")),
            ]
        )
    notes = [
        f"to one: time of an update, relative to {first}",
        "memory: per process",
        results.control_line(first, "seconds"),
    ]
    return Section(f"Against the number of processes, each training {results.settings['base']}", rows, notes)


def exchange_fraction(results: Results, name: str) -> float | None:
    """Fraction of an update's time that the all-reduce of gradients takes."""
    ratio = results.ratio(name + NO_EXCHANGE, name, "seconds")
    return None if ratio is None else 1 - ratio.median


def charts(results: Results) -> list[Chart]:
    settings, drawn = results.settings, []
    for axis, names in settings["axes"].items():
        places = {name: float(settings["work"][name]["gflop_per_image" if axis == "model" else axis]) for name in names}
        speed, memory, predicted = (
            sorted((place, value) for name, place in places.items() if (value := of(name)) is not None)
            for of in (
                lambda name: results.median(name, "images_per_second"),
                lambda name: results.median(name, "peak_memory_gb"),
                lambda name: _predicted_speed(results, name),
            )
        )
        lines = {"measured": speed, "predicted": predicted}
        drawn.append(
            Chart(f"against {TITLES[axis]}", "images/s", lines=lines, below=TITLES[axis], dashed=("predicted",))
        )
        drawn.append(Chart(f"against {TITLES[axis]}", "peak memory (GB)", lines={"memory": memory}, below=TITLES[axis]))
    return drawn + _charts_of_processes(results, settings["processes"])


def _predicted_speed(results: Results, name: str) -> float | None:
    settings, seconds = results.settings, predicted_seconds(results, name)
    return settings["iterations"] * settings["work"][name]["batch"] / seconds if seconds else None


def _charts_of_processes(results: Results, numbers: list[int]) -> list[Chart]:
    per_process = {n: results.median(processes_name(n), "images_per_second") for n in numbers}
    speed = {n: n * value for n, value in per_process.items() if value is not None}
    if not speed:
        return []
    first = min(speed)
    lines = {
        "measured": [(float(n), value) for n, value in speed.items()],
        "predicted": [(float(n), speed[first] / first * n) for n in speed],
    }
    return [Chart("against processes", "images/s", lines=lines, below="processes", dashed=("predicted",))]
