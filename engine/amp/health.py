"""Reports skipped updates, and ends a run whose gradients became NaN or whose updates are all skipped."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from engine.measure.meters import MOST_SKIPS, Position, Reading
from engine.report.reporter import Reporter
from engine.update import TrainState
from utils.config.schema import AmpConfig
from utils.distributed.world import World, all_gather
from utils.errors import AllRanksError
from utils.log import log
from vitamp.checkpoints import CHECKPOINTS, read_index

if TYPE_CHECKING:
    from engine.amp.overflow import Blame, OverflowWatch

TIMES_TO_BLAME = 2
"""A module that is blamed this often moves to fp32 (AMP.AUTO_FP32)."""


@dataclass
class Health:
    """Reports the updates that loss scaling skipped, and makes the errors that end a run which no longer learns."""

    amp: AmpConfig
    parts: TrainState
    world: World
    reporter: Reporter
    _last_blame: Blame | None = None
    """Cause of the skipped update that was reported last"""

    def report(self, position: Position, together: bool) -> None:
        """Report the causes of skipped updates that were found since the last call.

        A module that overflowed often moves to fp32 (AMP.AUTO_FP32).
        `together`: all ranks call it now. A single process reports at once, but several ranks only together, because
        any of them may have found a cause.
        """
        skips_updates = self.parts.precision.scaler.is_enabled()
        if not skips_updates or (self.world.size > 1 and not together):
            return
        from engine.amp.overflow import OverflowWatch

        watch = self.parts.callback(OverflowWatch)
        if watch is None:
            return

        # Several ranks may have replayed the same update. It is reported once, by the first blame of it: those that
        # name the operation are sorted to the front.
        blames = all_gather(watch.take(), self.world)
        blame_of_update: dict[int, Blame] = {}
        for blame in sorted(blames, key=lambda blame: blame.operation == ""):
            blame_of_update.setdefault(blame.update, blame)

        for _, blame in sorted(blame_of_update.items()):
            log.info("%s", blame.words())
            report_skip(self.reporter, position, blame)
            self._last_blame = blame
            # AMP.AUTO_FP32 counts what a smaller loss scale cannot cure: overflows in the forward pass, which do not
            # depend on the scale, and those in the backward pass at the smallest scale, 1.
            only_fp32_helps = blame.is_forward or blame.scale <= 1
            if self.amp.AUTO_FP32 and only_fp32_helps and self._is_in_model(blame):
                self._count_overflow(blame.module, watch)

    def _count_overflow(self, name: str, watch: OverflowWatch) -> None:
        """Count an overflow of the module `name`. After TIMES_TO_BLAME of them it computes in fp32."""
        overflows_of_module = watch.skips.blamed
        overflows_of_module[name] = overflows_of_module.get(name, 0) + 1
        if overflows_of_module[name] == TIMES_TO_BLAME:
            self.parts.force_fp32([name])
            self.parts.assemble()  # the half-precision copy, DDP and compiled code are made again with the new dtype
            watch.begin_anew()
            self.parts.meters.forget_skips()
            log.info("AMP.AUTO_FP32: %s overflowed %d times and computes in fp32 from now on", name, TIMES_TO_BLAME)

    def _is_in_model(self, blame: Blame) -> bool:
        return blame.module != "" and blame.module in dict(self.parts.model.named_modules())

    def too_many_skips(self, reading: Reading, update: int) -> AllRanksError | None:
        """Return the error that ends the run if too many updates in a row were skipped, else None.

        `update`: number of the last update. The error describes the last replay and advises which setting to change.
        """
        if reading.skipped_in_a_row < MOST_SKIPS:
            return None
        blame = self._last_blame
        can_use_auto_fp32 = (
            self.amp.LEVEL not in ("NAIVE", "O3") and self.parts.sharding is None and not self.amp.AUTO_FP32
        )
        if not self.amp.USE_DYNAMIC_LOSS_SCALING:
            advice = "The scale is fixed (AMP.USE_DYNAMIC_LOSS_SCALING false): set a smaller AMP.INIT_LOSS_SCALING"
        elif blame is not None and blame.module.startswith("teacher."):
            advice = "The teacher overflows, whatever the loss scale: use bf16, or another TRAIN.TEACHER_MODEL"
        elif can_use_auto_fp32 and blame is not None and blame.is_forward and self._is_in_model(blame):
            keep = f"AMP.FP32_MODULES=['{blame.module}'], or AMP.AUTO_FP32=true"
            advice = f"Keep that module in fp32 ({keep}), or use bf16"
        elif can_use_auto_fp32:
            advice = "Use bf16, or lower TRAIN.BASE_LR; AMP.AUTO_FP32=true moves modules that overflow to fp32"
        else:
            advice = "Use bf16, or lower TRAIN.BASE_LR"
        last_replay = f" The last that was replayed to find the overflow: {blame.words()}." if blame else ""
        return AllRanksError(
            f"{reading.skipped_in_a_row} updates in a row were skipped, up to update {update}; the loss scale is "
            f"{reading.scale:g}.{last_replay} The weights from before these updates are saved. {advice}."
        )

    def stop_on_nan(self, reading: Reading, position: Position, folder: Path) -> None:
        """Raise AllRanksError that names the first update whose gradients were NaN or infinite.

        Called without loss scaling: nothing has skipped that update, so the weights since then are useless.
        `reading`: `reading.first_bad` is the number of the update. `folder`: of the run, to name the last checkpoint.
        """
        update = reading.first_bad
        # The update is in the current epoch: `first_bad` is read at the latest when an epoch ends.
        updates_since = position.update - update
        steps_before_update = self.parts.schedule.stepped - updates_since - 1
        rate = self.parts.schedule.rate_at(steps_before_update)
        amp = ""
        if self.parts.precision.level != "O0":
            amp = "; or use -amp off to see whether the precision is the cause"
        last_checkpoint = read_index(folder / CHECKPOINTS)["last"]
        where = "There is no checkpoint yet."
        if last_checkpoint:
            where = f"The last checkpoint is {last_checkpoint}; resume from it with -resume."
        raise AllRanksError(
            f"the gradients became NaN or infinite at update {update} (epoch {position.epoch}, step "
            f"{position.step - updates_since}; learning rate {rate:.3e}). No checkpoint was saved after it. Try a "
            f"lower TRAIN.BASE_LR, a longer TRAIN.WARMUP_EPOCHS, or TRAIN.GRAD_CLIP=1.0{amp}. {where}"
        )


def report_skip(reporter: Reporter, position: Position, blame: Blame) -> None:
    """Report a skipped update under the epoch that it was in, because a GPU may answer only in the next epoch."""
    last_update_of_previous_epoch = position.update - position.step
    was_in_previous_epoch = blame.update <= last_update_of_previous_epoch
    epoch = position.epoch - 1 if was_in_previous_epoch else position.epoch
    # All fields of the blame, with two exceptions: `sample_indices` is called `samples`, and `noticed_at` depends on
    # the speed of the device.
    fields = {"update": blame.update, "samples": list(blame.sample_indices), **vars(blame)}
    perf = {"noticed_at": fields.pop("noticed_at")}
    del fields["sample_indices"]
    reporter.event("skip", replace(position, epoch=epoch), perf, **fields)
