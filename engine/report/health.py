"""Ends a run whose gradients became NaN or infinite."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from engine.measure.meters import NEVER, Reading
from engine.measure.progress import Position
from engine.report.reporter import Reporter
from engine.update import TrainState
from utils.config.schema import AmpConfig
from utils.distributed.world import World
from utils.errors import AllRanksError
from vitamp.checkpoints import CHECKPOINTS, read_index

if TYPE_CHECKING:
    from engine.amp.op_lists import OpLists


@dataclass
class Health:
    """Watches for NaN. Where the loss is scaled, `skips.ScaledHealth` watches for skipped updates too."""

    amp: AmpConfig
    parts: TrainState
    world: World
    reporter: Reporter
    op_lists: OpLists | None = None
    """AMP's lists, until the operators in them that the model never calls are reported."""

    def report(self, position: Position, together: bool) -> None:
        """Report what was found since the last call. `together`: all ranks call it now."""
        if self.op_lists is not None:  # the model has been computed by now
            self.op_lists.warn_uncalled()
            self.op_lists = None

    def check_is_due(self, position: Position) -> bool:
        """Whether to check for too many skips now: reports may be too far apart to notice them."""
        return False

    def too_many_skips(self, reading: Reading, update: int) -> AllRanksError | None:
        """The error that ends the run, if too many updates in a row were skipped, up to `update`."""
        return None

    def stop_on_nan(self, reading: Reading, position: Position, folder: Path) -> None:
        """Raise AllRanksError if a gradient was NaN: without loss scaling, no bad update is skipped."""
        if reading.first_bad == NEVER:
            return
        update = reading.first_bad
        since = position.update - update  # in the same epoch: the device is read at the end of each
        rate = self.parts.schedule.rate_at(self.parts.schedule.stepped - since - 1)
        last = read_index(folder / CHECKPOINTS)["last"]
        without_amp = "; or use -amp off to see whether the precision is the cause" * (
            self.parts.precision.level != "O0"
        )
        raise AllRanksError(
            f"the gradients became NaN or infinite at update {update} (epoch {position.epoch}, step "
            f"{position.step - since}; learning rate {rate:.3e}). No checkpoint was saved after it. Try a "
            f"lower TRAIN.BASE_LR, a longer TRAIN.WARMUP_EPOCHS, or TRAIN.GRAD_CLIP=1.0{without_amp}. "
            + (
                f"The last checkpoint is {last}; resume from it with -resume."
                if last
                else "There is no checkpoint yet."
            )
        )
