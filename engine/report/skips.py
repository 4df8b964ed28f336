"""Skipped updates: reporting which operation overflowed, and ending the run after too many."""

from __future__ import annotations

from dataclasses import dataclass, replace

from engine.amp.overflow import Blame, OverflowWatch
from engine.amp.replay import FORWARD
from engine.measure.meters import Position, Reading
from engine.report.outcome import Health
from engine.report.reporter import Reporter
from utils.distributed.world import all_gather
from utils.errors import AllRanksError
from utils.log import log

MOST_SKIPS = 100
"""So many skipped updates in a row end the run."""
TIMES_TO_BLAME = 2
"""A module that is blamed this often moves to fp32 (AMP.AUTO_FP32)."""


@dataclass
class ScaledHealth(Health):
    """Watches for skipped updates and NaN, where the loss is scaled."""

    _last: Blame | None = None

    def report(self, position: Position, together: bool) -> None:
        """Report updates skipped since the last call. `together`: all ranks call it now, since any may have found one.

        One process reports at once; several ranks only when all of them call it.
        """
        super().report(position, together)
        watch = self.parts.callback(OverflowWatch)
        if watch is None or (self.world.size > 1 and not together):
            return
        clearest: dict[int, Blame] = {}  # one report per update; of several ranks', the one that found the operation
        for blame in all_gather(watch.take(), self.world):
            if blame.update not in clearest or (blame.operation and not clearest[blame.update].operation):
                clearest[blame.update] = blame
        for _, blame in sorted(clearest.items()):
            log.info("%s", blame.words())
            report_skip(self.reporter, position, blame)
            self._last = blame
            if self.amp.AUTO_FP32:
                self._move_to_fp32(blame, watch)

    def _move_to_fp32(self, blame: Blame, watch: OverflowWatch) -> None:
        """Move a module that was blamed often enough to fp32.

        A backward overflow counts only at the smallest loss scale; a forward one does not depend on it.
        """
        if blame.module not in dict(self.parts.model.named_modules()) or not blame.module:
            return
        if blame.direction != FORWARD and blame.scale > 1:
            return
        blamed = watch.skips.blamed
        blamed[blame.module] = blamed.get(blame.module, 0) + 1
        if blamed[blame.module] == TIMES_TO_BLAME:
            self.parts.force_fp32([blame.module])
            watch.begin_anew()
            log.info(
                "AMP.AUTO_FP32: %s overflowed %d times and computes in fp32 from now on", blame.module, TIMES_TO_BLAME
            )

    def check_is_due(self, position: Position) -> bool:
        return position.update % MOST_SKIPS == 0

    def too_many_skips(self, reading: Reading, update: int) -> AllRanksError | None:
        if reading.skipped_in_a_row < MOST_SKIPS:
            return None
        last = f" The last that was replayed to find the overflow: {self._last.words()}." if self._last else ""
        return AllRanksError(
            f"{reading.skipped_in_a_row} updates in a row were skipped, up to update {update}; "
            f"the loss scale is {reading.scale:g}.{last} The "
            f"weights from before these updates are saved. {self._advice()}"
        )

    def _advice(self) -> str:
        if not self.amp.USE_DYNAMIC_LOSS_SCALING:
            return "The scale is fixed (AMP.USE_DYNAMIC_LOSS_SCALING false): set a smaller AMP.INIT_LOSS_SCALING."
        blame = self._last
        if blame is not None and blame.module.startswith("teacher."):
            return "The teacher overflows, whatever the loss scale: use bf16, or another TRAIN.TEACHER_MODEL."
        if self.amp.LEVEL in ("NAIVE", "O3") or self.parts.sharding is not None:  # no AUTO_FP32 there
            return "Use bf16, or lower TRAIN.BASE_LR."
        named = blame is not None and blame.module and blame.module in dict(self.parts.model.named_modules())
        if blame is not None and named and blame.direction == FORWARD:
            return (
                f"Keep that module in fp32 (AMP.FP32_MODULES=['{blame.module}'], or AMP.AUTO_FP32=true), or use bf16."
            )
        return "Use bf16, or lower TRAIN.BASE_LR; AMP.AUTO_FP32=true moves modules that overflow to fp32."


def report_skip(reporter: Reporter, position: Position, blame: Blame) -> None:
    """Write the line of a skipped update in its own epoch; a GPU may report it only in the next one."""
    before = blame.update <= position.update - position.step
    fields = {"update": blame.update, "samples": list(blame.sample_indices), **vars(blame)}
    perf = {"noticed_at": fields.pop("noticed_at")}
    del fields["sample_indices"]
    reporter.event("skip", replace(position, epoch=position.epoch - before), perf, **fields)
