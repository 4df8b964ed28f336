"""What is done, and told, when a device's memory does not suffice for an update or a validation (TRAIN.OOM)."""

from __future__ import annotations

import gc
import re
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from datasets import Batch, Share, Window
from engine.amp.half_copy import sum_gradients
from engine.amp.skip_watch import MicroBatches
from engine.checkpoint.folder import read_index
from engine.machine.device import describe_one
from engine.machine.memory import IN_VALIDATION, in_gib, is_out_of_memory, largest_blocks, total_memory
from engine.machine.stopping import OUT_OF_MEMORY, Stopped
from engine.measure.stage_times import BACKWARD, COPY, FORWARD, OTHER
from engine.measure.throughput import peak_memory_gb
from engine.update import Computed, Parts
from utils.config import Config
from utils.config.kinds import AUTO
from utils.distributed.group import this_rank
from utils.distributed.world import World
from utils.errors import TrainingError
from utils.late_compiler import uncompiled
from utils.log import log
from utils.seeding import seed_all

if TYPE_CHECKING:
    from engine.trainer import Trainer


def fit(trainer: Trainer) -> int:
    """Train; where memory runs out, say what took it, what helps, and what to go on from."""
    try:
        return trainer.fit()
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        told = describe(error, trainer.config, trainer.parts, trainer.position.update + 1)
        last = read_index(trainer.folder / "checkpoints")["last"]
        kept = f"The last checkpoint is {last}: go on from it by -resume {trainer.folder} and one of these."
        raise TrainingError(
            f"{told}\n{kept if last else 'There is no checkpoint yet: start with one of these.'}"
        ) from None


def before_training(error: BaseException, config: Config, device: torch.device) -> str:
    """Where not even what a run begins with fits, or the validation that is all there is to do."""
    if IN_VALIDATION in getattr(error, "__notes__", ()):
        where, ways = IN_VALIDATION, ways_out(config, validating=True, found=config.DATA.BATCH_SIZE == AUTO)
    else:
        where, ways = "before the first update", ["a smaller MODEL.NAME or -batch_size"]
        if not config.AMP.ENABLED:
            ways.insert(0, "-amp")
        if config.DIST.STRATEGY != "fsdp":
            ways.append("DIST.STRATEGY=fsdp, which shards the weights over several devices")
    return "\n".join([f"out of memory {where}: {_taken(error, device)}.", "Ways out:", *(f"  {way}" for way in ways)])


def describe(error: BaseException, config: Config, parts: Parts, update: int) -> str:
    """Where it was, the peak, what is large, and ways out. While `error` lives, so do the tensors it met."""
    validating = IN_VALIDATION in getattr(error, "__notes__", ())
    where = f"{IN_VALIDATION} after update {update - 1}" if validating else f"in update {update}"
    lines = [
        f"out of memory {where}: {_taken(error, parts.precision.device)}.",
        f"  {_sizes(config, parts, validating)}",
    ]
    if blocks := largest_blocks(parts.precision.device):
        lines.append(f"  Most of the memory is taken by {blocks}.")
    return "\n".join([*lines, "Ways out:", *(f"  {way}" for way in ways_out(config, validating, parts.batch_found))])


def ways_out(config: Config, validating: bool, found: bool = False) -> list[str]:
    """What to add to the command line, each with what it does. `found`: the batch size is what `auto` gave."""
    train, batch = config.TRAIN, config.DATA.BATCH_SIZE
    validated = config.DATA.BATCH_SIZE_EVAL or batch
    ways = []
    if validating and validated == AUTO:
        ways.append("-batch_size_eval N, fewer than auto found: a validation's figures do not depend on it")
    elif validating and validated > 1:
        ways.append(f"-batch_size_eval {validated // 2}: a validation's figures do not depend on it")
    elif not validating and batch > 1:
        factor = next(number for number in range(2, batch + 1) if batch % number == 0)
        accumulation = "" if train.GLOBAL_BATCH else f" -accum_iter {factor * train.ACCUM_ITER}"
        by_itself = " (TRAIN.OOM=split does it by itself, on one device)" if train.OOM == "stop" else ""
        ways.append(f"-batch_size {batch // factor}{accumulation}: the same images an update, fewer at once{by_itself}")
    if train.GRAD_CHECKPOINT == "none" and not validating:
        ways.append("TRAIN.GRAD_CHECKPOINT=blocks: less is kept for the backward pass, which computes it again")
    if not config.AMP.ENABLED:
        ways.append("-amp: most of what is kept takes half the room")
    if not found:
        ways.append("-batch_size auto: finds how many images fit")
    return ways


def _taken(error: BaseException, device: torch.device) -> str:
    total = total_memory(device)
    words = f"{in_gib(1e9 * peak_memory_gb(device))} was the peak on {device} ({describe_one(device)})"
    if total is not None and device.type != "cuda":  # a GPU's description tells it
        words += f", of {in_gib(total)} in all"
    asked = re.search(r"[Tt]ried to allocate (\d+) bytes|Tried to allocate ([\d.]+ \w+)", str(error))
    if asked is None:
        return words
    return f"{words}, and {asked[2] or in_gib(int(asked[1]))} more were asked for"


def _sizes(config: Config, parts: Parts, validating: bool) -> str:
    data = config.DATA
    batch = (data.BATCH_SIZE_EVAL if validating else None) or data.BATCH_SIZE
    words = f"{batch} images at a time, of {data.IMAGE_SIZE} x {data.IMAGE_SIZE} x {data.IMAGE_CHANNELS}"
    tokens, width = _tokens(parts.model), getattr(parts.model, "embed_dim", None)
    if tokens is None or not isinstance(width, int):
        return f"{words}."
    size = batch * tokens * width * torch.finfo(parts.precision.choice.dtype).bits // 8
    return f"{words}: with {tokens} tokens of width {width} each, one tensor of all tokens takes {in_gib(size)}."


def _tokens(model: nn.Module) -> int | None:
    """Of an image."""
    position = getattr(model, "pos_embed", None)
    return position.shape[1] if isinstance(position, Tensor) and position.ndim == 3 else None


class Splitting:
    """TRAIN.OOM split: what does not fit is computed again in parts, with the gradient of the whole.

    A micro-batch is erased and mixed before it is split, so that the same images are seen. Of several processes none
    goes on alone: before they exchange gradients they tell each other whether all had enough memory; if not, the run is
    saved and ends.
    """

    def __init__(self, config: Config, world: World) -> None:
        self._config, self._world = config, world
        self._group: torch.distributed.ProcessGroup | None = None
        if world.size > 1:
            import torch.distributed

            group = torch.distributed.new_group(backend="gloo")
            assert isinstance(group, torch.distributed.ProcessGroup)
            self._group = group

    def accumulate(self, parts: Parts, window: Window, update: int) -> MicroBatches | None:
        """As `engine.update.accumulate` does, from the beginning again where memory runs out."""
        batches = list(window)
        while True:
            computed, trouble = self._attempt(parts, batches, update)
            self._stop_together(trouble, parts)
            if computed is not None:
                break
            _forget(parts)
            self._split_further(parts, max(len(batch.images) for _, batch in batches), update)
        if self._world.size > 1 and parts.half_copy is None:
            sum_gradients(parts.model, self._world)
        for (share, _), one in zip(batches, computed, strict=True):
            parts.meters.add(one.loss, one.logits, one.labels, share.weight)
        parts.stages.lap(OTHER)
        kept: MicroBatches | None = []
        for share, batch in batches:
            kept = parts.watch.collect(kept, share, batch) if parts.watch is not None else None
        return kept

    def _attempt(self, parts: Parts, batches: MicroBatches, update: int) -> tuple[list[Computed] | None, str | None]:
        """What came of each micro-batch; or nothing, and what went wrong."""
        try:
            return [self._pass(parts, share, batch, update) for share, batch in batches], None
        except Exception as error:
            alone_too_large = self._world.size == 1 and parts.most_at_once == 1
            if not is_out_of_memory(error) or alone_too_large:
                raise
            return None, describe(error, self._config, parts, update)

    def _pass(self, parts: Parts, share: Share, batch: Batch, update: int) -> Computed:
        parts.stages.lap(COPY)
        seed_all(parts.seed, "micro", update, share.number)
        if parts.most_at_once is None or len(batch.images) <= parts.most_at_once:
            loss, logits, labels = parts.compute(batch)
            _backward(parts, loss * share.weight)
            return Computed(loss.detach(), logits, labels)
        with parts.precision.autocast():
            images, targets, labels = parts.change(parts.inputs(batch.images), batch.labels)
        count = -(-len(images) // parts.most_at_once)
        losses, logits = [], []
        for some, theirs in zip(images.tensor_split(count), targets.tensor_split(count), strict=True):
            with uncompiled(), parts.precision.autocast():
                found = parts.forward(some)
                # The whole's mean is made of the parts' means by their numbers of images.
                loss = parts.criterion(found.float(), theirs) * (len(some) / len(images))
            _backward(parts, loss * share.weight)
            losses.append(loss.detach())
            logits.append(found.detach())
        return Computed(torch.stack(losses).sum(), torch.cat(logits), labels)

    def _split_further(self, parts: Parts, images: int, update: int) -> None:
        at_once = min(images, parts.most_at_once or images)
        parts.most_at_once = -(-at_once // 2)
        log.warning(
            "Out of memory in update %d with %d images at a time: it is computed again, and from now on at most %d are "
            "taken at a time (TRAIN.OOM: split).",
            update,
            at_once,
            parts.most_at_once,
        )

    def _stop_together(self, trouble: str | None, parts: Parts) -> None:
        """Raise on all ranks where one ran out of memory; nobody waits for gradients yet."""
        if self._world.size == 1:
            return
        failed = torch.tensor(int(trouble is not None))
        torch.distributed.all_reduce(failed, torch.distributed.ReduceOp.MAX, self._group)
        if not failed:
            return
        _forget(parts)
        told: list[str | None] = [None] * self._world.size
        mine = f"{this_rank()}: {trouble}" if trouble else None
        torch.distributed.all_gather_object(told, mine, self._group)
        log.error(
            "%s\nTRAIN.OOM split repeats updates on one device only; on %d processes the run is saved as it was before "
            "this one. Go on by -resume and one of these.",
            next(filter(None, told)),
            self._world.size,
        )
        raise Stopped(OUT_OF_MEMORY)


def _backward(parts: Parts, loss: Tensor) -> None:
    parts.stages.lap(FORWARD)
    parts.precision.backward(loss)
    if parts.half_copy is not None:
        parts.half_copy.collect_gradients()
    parts.stages.lap(BACKWARD)


def _forget(parts: Parts) -> None:
    """The gradients of an attempt that failed half-way are not to be counted twice; and make room."""
    parts.optimizer.zero_grad(set_to_none=True)
    parts.forward.zero_grad(set_to_none=True)  # a half-precision copy has some of its own
    gc.collect()
    if parts.precision.device.type == "cuda":
        torch.cuda.empty_cache()
