"""Error messages for a device that runs out of memory: where it did, what takes the memory, and ways out."""

import re
from collections.abc import Callable

import torch

from engine.amp.precision import amp_may_gain
from engine.machine.device import Run, describe_device
from engine.machine.memory import IN_VALIDATION, in_gib, peak_memory_gb, total_memory
from engine.trainer import Trainer
from utils.config import Config
from utils.config.kinds import AUTO
from utils.errors import TrainingError
from utils.text import counted
from vitamp.checkpoints import CHECKPOINTS, read_index
from vitamp.sizes import in_pixels

AMP_FLAG = "-amp"
AMP_FLAG_ON_CPU = "-amp bf16"
"""On a CPU, -amp alone may be fp32"""


def while_training(error: BaseException, trainer: Trainer) -> TrainingError:
    """Return the error for a training that ran out of memory, with the checkpoint to resume from."""
    # It ends with a list of ways to need less memory, to which "one of these" refers.
    description = describe(error, trainer.run, trainer.position.update + 1)
    config = trainer.run.config
    last = read_index(trainer.folder / CHECKPOINTS)["last"]
    if last:
        next_step = f"The last checkpoint is {last}: resume from it with -resume {trainer.folder} and one of these."
    elif config.OUTPUT is not None and config.MODEL.RESUME != AUTO:  # the folder contains a run now
        next_step = "There is no checkpoint yet: start again with another -output and one of these."
    else:
        next_step = "There is no checkpoint yet: start again with one of these."
    return TrainingError(f"{description}\n{next_step}")


def describe(error: BaseException, run: Run, update: int | None = None) -> str:
    """Describe where memory ran out, the peak, the batch that was too large, and ways out.

    `error`: as torch raised it; while it is alive, so are the tensors that took the memory.
    `update`: number of the update in which it ran out; None before or without training.
    """
    config = run.config
    data = config.DATA
    batch_is_auto = run.auto_batch_size or data.BATCH_SIZE == AUTO
    is_validating = IN_VALIDATION in getattr(error, "__notes__", ())
    if is_validating:
        where = IN_VALIDATION if update is None else f"{IN_VALIDATION} after update {update - 1}"
        ways = ways_out(config, is_validating, run.device, batch_is_auto)
    elif update is not None:
        where = f"in update {update}"
        ways = ways_out(config, is_validating, run.device, batch_is_auto)
    else:
        where = "before the first update"
        ways = _ways_before_training(config, run.device)

    lines = [f"out of memory {where}: {_describe_peak(error, run.device)}."]
    batch = data.BATCH_SIZE
    if is_validating and data.BATCH_SIZE_EVAL:
        batch = data.BATCH_SIZE_EVAL
    if batch != AUTO:
        lines.append(f"  {counted(batch, 'image')} at a time, of {in_pixels(data.IMAGE_SIZE)} x {data.IMAGE_CHANNELS}.")
    lines.append("Ways out:")
    lines += [f"  {way}" for way in ways]
    return "\n".join(lines)


def _describe_peak(error: BaseException, device: torch.device) -> str:
    """Describe the memory at the peak, the memory of the device, and the allocation that failed, if torch says it."""
    text = f"the peak was {in_gib(1e9 * peak_memory_gb(device))} on {device} ({describe_device(device)})"
    total = None if device.type == "cuda" else total_memory(device)  # a GPU's description has it
    if total:
        text += f", of {in_gib(total)} in total"
    # On a CPU torch gives the size in bytes, on a GPU with a unit.
    allocation = re.search(r"[Tt]ried to allocate (\d+) bytes|Tried to allocate ([\d.]+ \w+)", str(error))
    if allocation:
        in_bytes, with_unit = allocation.groups()
        size = with_unit or in_gib(int(in_bytes))
        text += f", and {size} more were requested"
    return text


def _ways_before_training(config: Config, device: torch.device) -> list[str]:
    """List ways to need less memory if it ran out before the first update: the model itself does not fit."""
    ways = []
    if not config.AMP.ENABLED and amp_may_gain(device):
        ways.append(AMP_FLAG_ON_CPU if device.type == "cpu" else AMP_FLAG)
    ways.append("a smaller MODEL.NAME or -batch_size")
    if config.DIST.STRATEGY != "fsdp":
        ways.append("DIST.STRATEGY=fsdp, which shards the weights over several devices")
    return ways


def ways_out(
    config: Config,
    validating: bool,
    device: torch.device,
    batch_is_auto: bool = False,
    fits: Callable[[int], bool] = bool,
) -> list[str]:
    """List what a user can add to the command to need less memory, each with a reason.

    Settings are written as KEY=VALUE, since that also overrides a flag in the same command, such as -batch_size.
    `validating`: for a validation, else for training. `batch_is_auto`: `auto` has chosen the batch size. `fits`: says
    whether a smaller batch of training is estimated to fit; by default, all are.
    """
    smaller = _smaller_validation(config) if validating else _smaller_batch(config, fits)
    ways = [] if smaller is None else [smaller]
    if config.TRAIN.GRAD_CHECKPOINT == "none" and not validating:
        ways.append("TRAIN.GRAD_CHECKPOINT=blocks: fewer saved activations; the backward pass recomputes them")
    if not config.AMP.ENABLED and amp_may_gain(device):
        flag = AMP_FLAG_ON_CPU if device.type == "cpu" else AMP_FLAG
        ways.append(f"{flag}: most activations take half the memory")
    has_own_size = validating and config.DATA.BATCH_SIZE_EVAL is not None
    if not batch_is_auto and not has_own_size and config.DIST.STRATEGY != "fsdp":
        ways.append("DATA.BATCH_SIZE=auto: finds how many images fit")
    return ways


def _smaller_validation(config: Config) -> str | None:
    """Suggest a setting for smaller batches in validation; None if a batch has one image already."""
    size = config.DATA.BATCH_SIZE_EVAL or config.DATA.BATCH_SIZE
    if size == AUTO:
        return (
            "DATA.BATCH_SIZE_EVAL=N, smaller than the size that auto found: a validation's metrics do not depend on it"
        )
    if size > 1:
        return f"DATA.BATCH_SIZE_EVAL={size // 2}: a validation's metrics do not depend on it"
    return None


def _smaller_batch(config: Config, fits: Callable[[int], bool]) -> str | None:
    """Suggest settings for fewer images at once, but as many per update; None if no smaller batch `fits`."""
    train = config.TRAIN
    batch = config.DATA.BATCH_SIZE
    # The smallest factor leaves the largest batch, which is the fastest.
    factors = (number for number in range(2, batch + 1) if batch % number == 0 and fits(batch // number))
    factor = next(factors, None)
    one_is_left = factor == batch
    if factor is None or (one_is_left and train.mixes):  # mixing takes two images
        return None
    accumulation = "" if train.GLOBAL_BATCH else f" TRAIN.ACCUM_ITER={factor * train.ACCUM_ITER}"
    return f"DATA.BATCH_SIZE={batch // factor}{accumulation}: the same images per update, fewer at once"
