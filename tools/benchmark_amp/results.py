"""Measurements of a table of benchmark_amp.py, and the numbers, notes and reports made from them.

It imports nothing heavy: the pages of the docs are made from the -json files without torch.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from tools.common.tables import Section, at_commit, for_docs, for_terminal, source
from tools.common.turns import Ratio, ratio
from utils.text import counted

Metrics = dict[str, Any]
"""Metrics of one turn of one contender, as plain values; {'failed': reason} if it could not be measured."""

AGAIN = ", again"
"""Suffix of the control: a contender that is measured twice. The ratio of the two shows the noise."""
DEFAULTS = {"MODEL.NAME": "vit_base_patch16_224", "DATA.IMAGE_SIZE": 224, "DATA.BATCH_SIZE": 256, "TRAIN.ACCUM_ITER": 1}
"""Of settings that the report names; files hold only those that differ from the default."""
NOT_SHOWN = ("computed_in", "compile_why")


class Results(dict[str, Any]):
    """Contents of a -json file; `measure` in command.py lists the fields."""

    @property
    def turns(self) -> dict[str, list[Metrics]]:
        """Name of a contender -> its turns."""
        return self["turns"]

    @property
    def settings(self) -> dict[str, Any]:
        return self["settings"]

    @property
    def is_empty(self) -> bool:
        """Whether no turn could be measured."""
        return all("failed" in turn for turns in self.turns.values() for turn in turns)

    def per_turn(self, name: str, key: str) -> list[float]:
        """Metric `key` in every turn of a contender that has it."""
        return [turn[key] for turn in self.turns.get(name, []) if turn.get(key) is not None]

    def median(self, name: str, key: str) -> float | None:
        values = self.per_turn(name, key)
        return statistics.median(values) if values else None

    def ratio(self, name: str, other: str, key: str) -> Ratio | None:
        """Metric `key` of one contender relative to another's."""
        return ratio(self.per_turn(name, key), self.per_turn(other, key))

    def precision(self, name: str) -> str:
        return self._first(name, "precision", "-")

    def _first(self, name: str, key: str, default: Any) -> Any:
        """`key` of a contender's first turn that has it."""
        return next((turn[key] for turn in self.turns.get(name, []) if key in turn), default)

    def failures(self) -> list[str]:
        """One line per reason why contenders could not be measured."""
        names: dict[str, list[str]] = {}
        failed = {name: reason for name in self.turns if (reason := self._first(name, "failed", ""))}
        for name, reason in [*self["left_out"].items(), *failed.items()]:
            names.setdefault(reason, []).append(name)
        return [f"not measured: {quoted(who)}: {reason}" for reason, who in names.items()]

    def cell(self, key: str, digits: int = 3, factor: float = 1.0) -> Callable[[str], str]:
        """A column of a table: the median of metric `key`, times `factor`."""

        def shown_median(name: str) -> str:
            median = self.median(name, key)
            return shown(None if median is None else factor * median, digits)

        return shown_median

    def control_line(self, name: str, key: str, label: str = "") -> str:
        """Note on the noise, measured by the contender that runs twice. `label`: its name in the table, if another."""
        control = shown(self.ratio(name + AGAIN, name, key))
        return f"control: {quoted([label or name])} against itself: {control}; ratios within this range are noise"

    def choices_lines(self, labels: Mapping[str, str]) -> list[str]:
        """Notes on kernels and formats chosen by the device or by measurement, grouped by equal choices.

        `labels`: name of a contender -> its name in the table.
        """
        alike: dict[str, list[str]] = {}
        for name, label in labels.items():
            choices = self._first(name, "choices", {})
            words = [f"{key} {value}" for key, value in choices.items() if key not in NOT_SHOWN and value is not False]
            alike.setdefault(", ".join(words), []).append(label)
        return [f"kernels and formats chosen for {quoted(who)}: {words}" for words, who in alike.items() if words]

    def _setting(self, key: str) -> Any:
        return self.settings.get(key, DEFAULTS[key])

    def subject(self) -> str:
        """Model, image size and batch size."""
        size, batch = self._setting("DATA.IMAGE_SIZE"), self._setting("DATA.BATCH_SIZE")
        return f"{self._setting('MODEL.NAME')}, {size} pixels, batch {batch}"

    def iteration_line(self) -> str:
        """Note on the number of images per iteration."""
        batch, parts = int(self._setting("DATA.BATCH_SIZE")), int(self._setting("TRAIN.ACCUM_ITER"))
        images = f"{batch} images" if parts == 1 else f"{parts} micro-batches of {batch} images"
        return f"an iteration is one update of {images}"

    def images_line(self) -> str:
        """Note on the images and on the wait for them."""
        medians = {name: self.median(name, "data_wait_percent") for name in self.turns}
        waits = {name: wait for name, wait in medians.items() if wait is not None}
        if not waits:
            return f"images: {self['images']}"
        most = max(waits, key=lambda name: waits[name])
        least, longest = (f"{wait:.0f} %" for wait in (min(waits.values()), waits[most]))
        span = longest if least == longest else f"{least} to {longest} (most: {quoted([most])})"
        return f"images: {self['images']}; waiting for data: {span} of the time"

    def machine(self) -> str:
        """Device, clock, versions and date."""
        versions = ", ".join(f"{name} {version}" for name, version in self["versions"].items())
        clock = self["clock_mhz"]
        mhz = f"clock {min(clock)} to {max(clock)} MHz" if clock else "clock unknown"
        return f"{self['device']}, {mhz}, {versions}, {self['date']}"


def quoted(names: Iterable[str]) -> str:
    """Names of contenders, which may contain commas, as a list."""
    return ", ".join(f"`{name}`" for name in names)


def shown(value: float | Ratio | None, digits: int = 3) -> str:
    """A cell of a table, with as many digits as are meaningful; '-' for None."""
    if value is None or isinstance(value, Ratio):
        return "-" if value is None else str(value)
    return f"{value:,.0f}" if abs(value) >= 10 ** (digits - 1) else f"{value:.{digits}g}"


def percent(fraction: float | None) -> str:
    return "-" if fraction is None else f"{100 * fraction:.0f} %"


def lines(section: Section, results: Results) -> list[str]:
    """The report for the terminal."""
    notes = (results.images_line(), *results.failures(), results.machine(), results["command"])
    return [*for_terminal([section]), "", *(f"  {note}" for note in notes)]


def markdown(section: Section, results: Results, link: str) -> str:
    """The report for a page of the docs. `link`: the -json file."""
    images = [results.images_line()] if "images" in results else []  # files of earlier versions have none
    notes = [*section.notes, *images, *results.failures()]
    rounds = counted(results["rounds"], "round") + ", fewer where the time ran out" * results["cut"]
    measured = (
        f"Contenders alternate, {rounds}. Measured on {results.machine()}{at_commit(results)}: "
        f"`{results['command']}`. {source(link)}"
    )
    return "\n".join([*for_docs([Section(section.title, section.rows, notes)]), measured]) + "\n"
