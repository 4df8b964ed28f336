"""Error reports for a device that runs out of memory: what takes it, and ways out."""

import re

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

HALF = {"cpu": "-amp bf16"}
"""The word for 16 bits where -amp alone may be fp32"""


def while_training(error: BaseException, trainer: Trainer) -> TrainingError:
    """Error for a training that ran out of memory, with the checkpoint to resume from."""
    words = describe(error, trainer.run, trainer.position.update + 1)
    config = trainer.run.config
    last = read_index(trainer.folder / CHECKPOINTS)["last"]
    if last:
        again = f"The last checkpoint is {last}: resume from it with -resume {trainer.folder} and one of these."
    elif config.OUTPUT is not None and config.MODEL.RESUME != AUTO:  # the folder contains a run now
        again = "There is no checkpoint yet: start again with another -output and one of these."
    else:
        again = "There is no checkpoint yet: start again with one of these."
    return TrainingError(f"{words}\n{again}")


def describe(error: BaseException, run: Run, update: int | None = None) -> str:
    """Where memory ran out, the peak, what is large, and ways out. `update` None: in no training.

    While `error` is alive, so are the tensors that took the memory.
    """
    config = run.config
    data = config.DATA
    is_validating = IN_VALIDATION in getattr(error, "__notes__", ())
    if is_validating:
        where = IN_VALIDATION if update is None else f"{IN_VALIDATION} after update {update - 1}"
    else:
        where = "before the first update" if update is None else f"in update {update}"
    if is_validating or update is not None:
        ways = ways_out(config, is_validating, run.device, found=run.auto_batch_size or data.BATCH_SIZE == AUTO)
    else:
        ways = _ways_before_training(config, run.device)

    lines = [f"out of memory {where}: {_taken(error, run.device)}."]
    batch = data.BATCH_SIZE
    if is_validating and data.BATCH_SIZE_EVAL:
        batch = data.BATCH_SIZE_EVAL
    if batch != AUTO:
        lines.append(f"  {counted(batch, 'image')} at a time, of {in_pixels(data.IMAGE_SIZE)} x {data.IMAGE_CHANNELS}.")
    lines.append("Ways out:")
    lines += [f"  {way}" for way in ways]
    return "\n".join(lines)


def _taken(error: BaseException, device: torch.device) -> str:
    """What was held at the peak, of how much, and what was asked for."""
    taken = f"the peak was {in_gib(1e9 * peak_memory_gb(device))} on {device} ({describe_device(device)})"
    total = None if device.type == "cuda" else total_memory(device)  # a GPU's description has it
    if total:
        taken += f", of {in_gib(total)} in total"
    asked = re.search(r"[Tt]ried to allocate (\d+) bytes|Tried to allocate ([\d.]+ \w+)", str(error))
    if asked:
        size = asked[2] or in_gib(int(asked[1]))
        taken += f", and {size} more were requested"
    return taken


def _ways_before_training(config: Config, device: torch.device) -> list[str]:
    ways = []
    if not config.AMP.ENABLED and amp_may_gain(device):
        ways.append(HALF.get(device.type, "-amp"))
    ways.append("a smaller MODEL.NAME or -batch_size")
    if config.DIST.STRATEGY != "fsdp":
        ways.append("DIST.STRATEGY=fsdp, which shards the weights over several devices")
    return ways


def ways_out(config: Config, validating: bool, device: torch.device, found: bool = False) -> list[str]:
    """What to add to a command for less memory: KEY=VALUE beats flags. `found`: the batch size is from `auto`."""
    smaller = _smaller_validation(config) if validating else _smaller_batch(config)
    ways = [] if smaller is None else [smaller]
    if config.TRAIN.GRAD_CHECKPOINT == "none" and not validating:
        ways.append("TRAIN.GRAD_CHECKPOINT=blocks: fewer saved activations; the backward pass recomputes them")
    if not config.AMP.ENABLED and amp_may_gain(device):
        word = HALF.get(device.type, "-amp")
        ways.append(f"{word}: most activations take half the memory")
    has_own_size = validating and config.DATA.BATCH_SIZE_EVAL is not None
    if not found and not has_own_size and config.DIST.STRATEGY != "fsdp":
        ways.append("DATA.BATCH_SIZE=auto: finds how many images fit")
    return ways


def _smaller_validation(config: Config) -> str | None:
    size = config.DATA.BATCH_SIZE_EVAL or config.DATA.BATCH_SIZE
    if size == AUTO:
        return (
            "DATA.BATCH_SIZE_EVAL=N, smaller than the size that auto found: a validation's metrics do not depend on it"
        )
    if size > 1:
        return f"DATA.BATCH_SIZE_EVAL={size // 2}: a validation's metrics do not depend on it"
    return None


def _smaller_batch(config: Config) -> str | None:
    """Settings for fewer images at once and as many per update, if there are any."""
    train = config.TRAIN
    batch = config.DATA.BATCH_SIZE
    if batch == 1:
        return None
    factor = next(number for number in range(2, batch + 1) if batch % number == 0)
    if batch == factor and train.mixes:  # mixing takes two images
        return None
    accumulation = "" if train.GLOBAL_BATCH else f" TRAIN.ACCUM_ITER={factor * train.ACCUM_ITER}"
    return f"DATA.BATCH_SIZE={batch // factor}{accumulation}: the same images per update, fewer at once"
