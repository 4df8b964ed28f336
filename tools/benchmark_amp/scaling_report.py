"""What `scaling` tells: a table and two charts for each thing that grew."""

from __future__ import annotations

from tools.benchmark_amp.frame import (
    Chart,
    Found,
    Section,
    control_line,
    middle,
    shown,
    times_as_much,
)

WITHOUT = ", no exchange"
TITLES = {"batch": "batch size", "image": "image size (pixels)", "model": "model (GFLOP an image)"}


def group(number: int) -> str:
    return f"{number} process{'es' if number > 1 else ''}"


def sections(found: Found) -> list[Section]:
    settings = found["settings"]
    told = [_axis(found, axis, names) for axis, names in settings["axes"].items()]
    return [*told, *([_processes(found, settings["processes"])] if settings["processes"] else [])]


def _gflop(found: Found, name: str) -> float:
    """Of an update."""
    work = found["settings"]["work"][name]
    return work["gflop_per_image"] * work["batch"]


def predicted_seconds(found: Found, name: str) -> float | None:
    """What a turn would take at the rate of the middle size, by the model's own operations."""
    base = found["settings"]["base"]
    seconds, gflop = middle(found, base, "seconds"), _gflop(found, base)
    return seconds * _gflop(found, name) / gflop if seconds and gflop else None


def _axis(found: Found, axis: str, names: list[str]) -> Section:
    settings = found["settings"]
    base, updates = settings["base"], settings["iterations"]
    rows = [[TITLES[axis], "images/s", "ms/update", "work", "time", "predicted ms", "TFLOP/s", "memory (GB)"]]
    for name in names:
        work, seconds, predicted = (
            settings["work"][name],
            middle(found, name, "seconds"),
            predicted_seconds(found, name),
        )
        label = f"{work['model']} ({work['gflop_per_image']:.3g})" if axis == "model" else str(work[axis])
        grown = times_as_much(found, name, base, "seconds")
        rows.append(
            [
                label,
                shown(middle(found, name, "images_per_second")),
                shown(seconds and 1000 * seconds / updates),
                shown(_gflop(found, name) / _gflop(found, base) if _gflop(found, base) else None),
                "-" if grown is None else f"{grown.median:.2f}",
                shown(predicted and 1000 * predicted / updates),
                shown(seconds and _gflop(found, name) * updates / seconds / 1000),
                shown(middle(found, name, "peak_memory_gb")),
            ]
        )
    notes = [
        f"work and time: to {base}, whose rate is the predicted one",
        control_line(found, base, "seconds"),
    ]
    return Section(f"Against {TITLES[axis]}", rows, notes)


def _processes(found: Found, numbers: list[int]) -> Section:
    updates = found["settings"]["iterations"]
    rows = [["processes", "images/s", "ms/update", "to one", "no exchange: ms", "exchange", "memory (GB)"]]
    for number in numbers:
        name = group(number)
        seconds, alone, images = (
            middle(found, name, "seconds"),
            middle(found, name + WITHOUT, "seconds"),
            middle(found, name, "images_per_second"),
        )
        grown, saved = times_as_much(found, name, group(numbers[0]), "seconds"), exchange_percent(found, number)
        rows.append(
            [
                str(number),
                shown(images and number * images),
                shown(seconds and 1000 * seconds / updates),
                "-" if grown is None else f"{grown.median:.2f}",
                shown(alone and 1000 * alone / updates),
                "-" if saved is None else f"{saved:.0f} %",
                shown(middle(found, name, "peak_memory_gb")),
            ]
        )
    notes = ["memory: of each process", control_line(found, group(numbers[0]), "seconds")]
    return Section(f"Against processes, {found['settings']['base']} in each", rows, notes)


def exchange_percent(found: Found, number: int) -> float | None:
    """The share of an update's time that is gone where gradients are not exchanged."""
    share = times_as_much(found, group(number) + WITHOUT, group(number), "seconds")
    return None if share is None else 100 * (1 - share.median)


def charts(found: Found) -> list[Chart]:
    settings, drawn = found["settings"], []
    for axis, names in settings["axes"].items():
        places = {name: float(settings["work"][name]["gflop_per_image" if axis == "model" else axis]) for name in names}
        speed, memory, predicted = (
            sorted((place, value) for name, place in places.items() if (value := of(name)) is not None)
            for of in (
                lambda name: middle(found, name, "images_per_second"),
                lambda name: middle(found, name, "peak_memory_gb"),
                lambda name: _predicted_speed(found, name),
            )
        )
        lines = {"measured": speed, "predicted": predicted}
        drawn.append(Chart(f"against {TITLES[axis]}", "images/s", lines=lines, below=TITLES[axis]))
        drawn.append(Chart(f"against {TITLES[axis]}", "peak memory (GB)", lines={"memory": memory}, below=TITLES[axis]))
    return drawn + _charts_of_processes(found, settings["processes"])


def _predicted_speed(found: Found, name: str) -> float | None:
    settings, seconds = found["settings"], predicted_seconds(found, name)
    return settings["iterations"] * settings["work"][name]["batch"] / seconds if seconds else None


def _charts_of_processes(found: Found, numbers: list[int]) -> list[Chart]:
    speed = {n: n * value for n in numbers if (value := middle(found, group(n), "images_per_second")) is not None}
    if not speed:
        return []
    first = min(speed)
    lines = {
        "measured": [(float(n), value) for n, value in speed.items()],
        "predicted": [(float(n), speed[first] / first * n) for n in speed],
    }
    return [Chart("against processes", "images/s", lines=lines, below="processes")]
