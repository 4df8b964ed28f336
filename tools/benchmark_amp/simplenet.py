"""`simplenet`: three linear layers on random numbers, with AMP off, on, and on with accumulation."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from tools.benchmark_amp.frame import (
    AGAIN,
    Chart,
    Contender,
    Figures,
    Found,
    Plan,
    Section,
    Table,
    control_line,
    middle,
    precision_of,
    shown,
    shown_ratio,
    times_as_much,
)
from tools.benchmark_amp.settings import changed, settings_of
from tools.common.command_line import ToolLine
from utils.cli import Flag
from utils.config import Config

if TYPE_CHECKING:
    import torch

    from datasets import Batch, Window
    from engine.update import Parts

ABOUT = """Three linear layers on random numbers: AMP off, on, and on with ten batches an update; with the loss.

    python scripts/benchmark_amp.py simplenet
    python scripts/benchmark_amp.py simplenet -width 4096 -batch_size 512 -batches 50 -epochs 5

ReLU after the first two, mean squared error, SGD at 1e-4, loss scale 1024 where the loss is scaled. The numbers lie on
the device before time is taken; the loss that is told is the last update's. Such a net is nearly nothing but matrix
products: this is the most that AMP can do on a device."""
FLAGS = (
    Flag("width", "inputs and outputs of each layer (default 4096; on a CPU 512)", "N", ("WIDTH",)),
    Flag("batches", "batches of an epoch (default 50; on a CPU 20)", "N", ("BATCHES",)),
    Flag("epochs", "epochs of a turn (default 5; on a CPU 2)", "N", ("EPOCHS",)),
    Flag("accumulated", "batches an update in the third contender (default 10)", "N", ("ACCUMULATED",)),
    Flag("rounds", "turns of each (default 3)", "N", ("ROUNDS",)),
)
FIXED = {
    "TRAIN.OPTIMIZER.NAME": "SGD",
    "TRAIN.OPTIMIZER.MOMENTUM": 0.0,
    "TRAIN.BASE_LR": 1e-4,
    "TRAIN.END_LR": 1e-4,
    "TRAIN.WARMUP_EPOCHS": 0,
    "TRAIN.WEIGHT_DECAY": 0.0,
}
OFF, ON = "AMP off", "AMP on"
WARMUP = 2


def plan(line: ToolLine) -> Plan:
    loaded, device, remarks = settings_of(line, {"DATA.BATCH_SIZE": 64}, FIXED, {"DATA.BATCH_SIZE": 512})
    small = device.type == "cpu"
    width, batches = line.whole("WIDTH", 512 if small else 4096), line.whole("BATCHES", 20 if small else 50)
    epochs, accumulated = line.whole("EPOCHS", 2 if small else 5), line.whole("ACCUMULATED", 10)
    config = changed(loaded.config, "TRAIN", NUM_EPOCHS=epochs)
    if loaded.sources["AMP.INIT_LOSS_SCALING"] == "default":
        config = changed(config, "AMP", INIT_LOSS_SCALING=1024.0)

    from tools.benchmark_amp.training import device_in_words, gpu_of

    words = device_in_words(config, device)
    net = SimpleNet(config, device, width, batches)
    contenders = [
        Contender(OFF, lambda: net.turn(False, 1)),
        Contender(ON, lambda: net.turn(True, 1)),
        Contender(_accumulating(accumulated), lambda: net.turn(True, accumulated)),
        Contender(OFF + AGAIN, lambda: net.turn(False, 1)),
    ]
    wishes = {"width": width, "batch": config.DATA.BATCH_SIZE, "batches": batches, "epochs": epochs}
    wishes |= {"accumulated": accumulated, "amp": f"{config.AMP.LEVEL} {config.AMP.DTYPE}", "seed": config.SEED}
    return Plan(contenders, line.whole("ROUNDS", 3), wishes, words, gpu_of(device), remarks=remarks)


class SimpleNet:
    """The same first weights and the same numbers for every turn; what trains is the engine's own update."""

    def __init__(self, config: Config, device: torch.device, width: int, batches: int) -> None:
        import torch

        from datasets import Batch

        self._config, self._device, self._width = config, device, width
        generator = torch.Generator(device).manual_seed(config.SEED)
        size = config.DATA.BATCH_SIZE
        self._batches: list[Batch] = []
        for _ in range(batches):
            # Inputs, and behind them what is to come out: a batch has one place for both.
            numbers = torch.randn(2, size, width, device=device, generator=generator)
            places = torch.arange(size, device=device)
            self._batches.append(Batch(numbers, torch.zeros_like(places), places))

    def turn(self, enabled: bool, accumulated: int) -> Figures:
        from engine.machine.device import wait_for
        from engine.update import train_update

        for measured in (False, True):
            parts = self._parts(enabled)
            updates = list(self._windows(accumulated))[: None if measured else WARMUP]
            wait_for(self._device)
            began = time.perf_counter()
            for number, window in enumerate(updates, 1):
                train_update(parts, window, number)
            wait_for(self._device)
            seconds = time.perf_counter() - began
        reading = parts.meters.read(parts.precision.scale_tensor(), parts.schedule.last_rate())
        return {"seconds": seconds, "loss": reading.update.loss, "precision": parts.precision.name}

    def _windows(self, accumulated: int) -> Iterator[Window]:
        import numpy as np

        from datasets import Share, Window

        for _ in range(self._config.TRAIN.NUM_EPOCHS):
            for first in range(0, len(self._batches), accumulated):
                batches = self._batches[first : first + accumulated]
                places = np.arange(self._config.DATA.BATCH_SIZE)
                shares = tuple(Share(number, places, 1 / len(batches)) for number in range(len(batches)))
                yield Window(shares, iter(batches))

    def _parts(self, enabled: bool) -> Parts:
        from torch import Tensor, nn

        from engine.amp.precision import Precision
        from engine.inputs.mixup import Seen
        from engine.setup import update_parts
        from utils.distributed.world import ALONE
        from utils.seeding import seed_all

        def inputs_and_targets(numbers: Tensor, labels: Tensor) -> Seen:
            return Seen(numbers[0], numbers[1], labels)

        config, width = changed(self._config, "AMP", ENABLED=enabled), self._width
        seed_all(config.SEED, "init")
        layers = [nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width)]
        model = nn.Sequential(*layers).to(self._device)
        trained = model, nn.Identity(), Precision(config.AMP, self._device)
        parts = update_parts(config, ALONE, self._device, trained, len(self._batches))
        parts.criterion, parts.change = nn.MSELoss(), inputs_and_targets
        parts.start_computing()
        return parts


def _accumulating(batches: int) -> str:
    return f"AMP on, {batches} batches an update"


def sections(found: Found) -> list[Section]:
    settings = found["settings"]
    rows = [["", "precision", "seconds", "speed-up", "loss"]]
    for name in (OFF, ON, _accumulating(settings["accumulated"])):
        speedup = times_as_much(found, OFF, name, "seconds")
        seconds, loss = (shown(middle(found, name, key), 4) for key in ("seconds", "loss"))
        rows.append([name, precision_of(found, name), seconds, shown_ratio(speedup), loss])
    title = (
        f"Three linear layers of {settings['width']}, {settings['batches']} batches of {settings['batch']}, "
        f"{settings['epochs']} epochs"
    )
    return [Section(title, rows, [control_line(found, OFF, "seconds")])]


def charts(found: Found) -> list[Chart]:
    names = (OFF, ON, _accumulating(found["settings"]["accumulated"]), OFF + AGAIN)
    bars = {name: value for name in names if (value := middle(found, name, "seconds")) is not None}
    return [Chart(sections(found)[0].title, "seconds", bars=bars)]


TABLE = Table("simplenet", ABOUT, FLAGS, plan, sections, charts)
