"""`simplenet`: three linear layers on random numbers, with AMP off, on, and on with accumulation."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

from tools.benchmark_amp.results import AGAIN, Metrics, Results, shown
from tools.benchmark_amp.settings import changed, set_up
from tools.benchmark_amp.table import ROUNDS, Contender, Plan, Table
from tools.common.command_line import ToolLine
from tools.common.results.section import Chart, Section
from utils.config import Config
from utils.flags import Flag, whole
from utils.text import counted

if TYPE_CHECKING:
    import torch

    from datasets import Batch, Window
    from engine.update import Parts

ABOUT = """Time and loss of three linear layers on random numbers: without AMP, with AMP, and with AMP and accumulation.

    python scripts/benchmark_amp.py simplenet
    python scripts/benchmark_amp.py simplenet -width 4096 -batch_size 512 -batches 50 -epochs 5

ReLU after the first two layers, mean squared error, SGD at 1e-4, loss scale 1024 if the loss is scaled. The numbers are
on the device before the timer starts. The reported loss is that of the last update. The net does little but matrix
products, so its speed-up is about the most that AMP can reach on a device."""
FLAGS = (
    Flag("width", "inputs and outputs of each layer", "N", kind=whole(1), default_text="4096; on a CPU 512"),
    Flag("batches", "batches per epoch", "N", kind=whole(1), default_text="50; on a CPU 20"),
    Flag("epochs", "epochs per measurement", "N", kind=whole(1), default_text="5; on a CPU 2"),
    Flag("accumulated", "batches per update where AMP is on with accumulation", "N", default=10, kind=whole(1)),
    ROUNDS,
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
    setup = set_up(line, on_cpu={"DATA.BATCH_SIZE": 64}, on_gpu={"DATA.BATCH_SIZE": 512}, fixed=FIXED)
    asked, accumulated = line.asked, line.asked.accumulated
    width, batches = asked.width or (512 if setup.on_cpu else 4096), asked.batches or (20 if setup.on_cpu else 50)
    epochs = asked.epochs or (2 if setup.on_cpu else 5)
    config = changed(setup.config, "TRAIN", NUM_EPOCHS=epochs)
    if setup.is_default("AMP.INIT_LOSS_SCALING"):
        config = changed(config, "AMP", INIT_LOSS_SCALING=1024.0)
    machine = setup.machine()
    net = SimpleNet(config, setup.device, width, batches)
    contenders = [
        Contender(OFF, partial(net.turn, False, 1)),
        Contender(ON, partial(net.turn, True, 1)),
        Contender(_accumulating(accumulated), partial(net.turn, True, accumulated)),
        Contender(OFF + AGAIN, partial(net.turn, False, 1)),
    ]
    settings = {"width": width, "batch": config.DATA.BATCH_SIZE, "batches": batches, "epochs": epochs}
    settings |= {"accumulated": accumulated, "amp": f"{config.AMP.LEVEL} {config.AMP.DTYPE}", "seed": config.SEED}
    return Plan(
        contenders, asked.rounds, settings, machine, "none, but random numbers on the device", remarks=setup.remarks
    )


class SimpleNet:
    """The net on fixed numbers; every turn starts from the same weights and trains by the engine's own update."""

    def __init__(self, config: Config, device: torch.device, width: int, batches: int) -> None:
        import torch

        from datasets import Batch

        self._config, self._device, self._width = config, device, width
        generator = torch.Generator(device).manual_seed(config.SEED)
        size = config.DATA.BATCH_SIZE
        self._batches: list[Batch] = []
        for _ in range(batches):
            # Inputs followed by targets: a batch has one field for both.
            numbers = torch.randn(2, size, width, device=device, generator=generator)
            places = torch.arange(size, device=device)
            self._batches.append(Batch(numbers, torch.zeros_like(places), places))

    def turn(self, enabled: bool, accumulated: int) -> Metrics:
        from engine.machine.device import synchronize
        from engine.update import train_update

        for measured in (False, True):
            parts = self._parts(enabled)
            updates = list(self._windows(accumulated))[: None if measured else WARMUP]
            synchronize(self._device)
            began = time.perf_counter()
            for number, window in enumerate(updates, 1):
                train_update(parts, window, number)
            synchronize(self._device)
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
        from engine.inputs.mixup import TransformedBatch
        from engine.setup import update_parts
        from utils.distributed.world import ALONE
        from utils.seeding import seed_all

        def inputs_and_targets(numbers: Tensor, labels: Tensor) -> TransformedBatch:
            return TransformedBatch(numbers[0], numbers[1], labels)

        config, width = changed(self._config, "AMP", ENABLED=enabled), self._width
        seed_all(config.SEED, "init")
        layers = [nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width)]
        model = nn.Sequential(*layers).to(self._device)
        trained = model, nn.Identity(), Precision(config.AMP, self._device)
        parts = update_parts(config, ALONE, self._device, trained, len(self._batches))
        parts.criterion, parts.change = nn.MSELoss(), inputs_and_targets
        parts.assemble()
        return parts


def _accumulating(batches: int) -> str:
    return f"AMP on, {batches} batches an update"  # a key in -json files


def sections(results: Results) -> list[Section]:
    settings = results.settings
    rows = [["", "precision", "seconds", "speed-up", "loss"]]
    for name in (OFF, ON, _accumulating(settings["accumulated"])):
        seconds, loss = (shown(results.median(name, key), 4) for key in ("seconds", "loss"))
        rows.append([name, results.precision(name), seconds, shown(results.ratio(OFF, name, "seconds")), loss])
    title = (
        f"Three linear layers of {settings['width']}, {counted(settings['batches'], 'batch')} of {settings['batch']}, "
        f"{counted(settings['epochs'], 'epoch')}"
    )
    return [Section(title, rows, [results.control_line(OFF, "seconds")])]


def charts(results: Results) -> list[Chart]:
    names = (OFF, ON, _accumulating(results.settings["accumulated"]), OFF + AGAIN)
    bars = {name: value for name in names if (value := results.median(name, "seconds")) is not None}
    return [Chart(sections(results)[0].title, "seconds", bars=bars)]


TABLE = Table("simplenet", ABOUT, FLAGS, plan, sections, charts)
