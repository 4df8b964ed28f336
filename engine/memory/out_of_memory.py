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
    resume = f"The last checkpoint is {last}: resume from it with -resume {trainer.folder} and one of these."
    taken = config.OUTPUT is not None and config.MODEL.RESUME != AUTO  # the folder contains a run now
    again = f"There is no checkpoint yet: start again with {'another -output and ' if taken else ''}one of these."
    return TrainingError(f"{words}\n{resume if last else again}")


def describe(error: BaseException, run: Run, update: int | None = None) -> str:
    """Where memory ran out, the peak, what is large, and ways out. `update` None: in no training.

    While `error` is alive, so are the tensors that took the memory.
    """
    config = run.config
    data = run.config.DATA
    device = run.device
    validating = IN_VALIDATION in getattr(error, "__notes__", ())
    if validating:
        where = IN_VALIDATION + ("" if update is None else f" after update {update - 1}")
    else:
        where = "before the first update" if update is None else f"in update {update}"
    if validating or update is not None:
        ways = ways_out(config, validating, device, run.auto_batch_size or data.BATCH_SIZE == AUTO)
    else:
        ways = ["a smaller MODEL.NAME or -batch_size"]
        if not config.AMP.ENABLED and amp_may_gain(device):
            ways.insert(0, HALF.get(device.type, "-amp"))
        if config.DIST.STRATEGY != "fsdp":
            ways.append("DIST.STRATEGY=fsdp, which shards the weights over several devices")
    taken = f"the peak was {in_gib(1e9 * peak_memory_gb(device))} on {device} ({describe_device(device)})"
    if device.type != "cuda" and (total := total_memory(device)):  # a GPU's description has it
        taken += f", of {in_gib(total)} in total"
    if asked := re.search(r"[Tt]ried to allocate (\d+) bytes|Tried to allocate ([\d.]+ \w+)", str(error)):
        taken += f", and {asked[2] or in_gib(int(asked[1]))} more were requested"
    lines = [f"out of memory {where}: {taken}."]
    batch = (data.BATCH_SIZE_EVAL if validating else None) or data.BATCH_SIZE
    if batch != AUTO:
        lines.append(f"  {counted(batch, 'image')} at a time, of {in_pixels(data.IMAGE_SIZE)} x {data.IMAGE_CHANNELS}.")
    return "\n".join([*lines, "Ways out:", *(f"  {way}" for way in ways)])


def ways_out(config: Config, validating: bool, device: torch.device, found: bool = False) -> list[str]:
    """What to add to a command for less memory: KEY=VALUE beats flags. `found`: the batch size is from `auto`."""
    train = config.TRAIN
    batch = config.DATA.BATCH_SIZE
    validated = config.DATA.BATCH_SIZE_EVAL or batch
    ways = []
    if validating and validated == AUTO:
        ways.append(
            "DATA.BATCH_SIZE_EVAL=N, smaller than the size that auto found: a validation's metrics do not depend on it"
        )
    elif validating and validated > 1:
        ways.append(f"DATA.BATCH_SIZE_EVAL={validated // 2}: a validation's metrics do not depend on it")
    elif not validating and batch > 1:
        factor = next(number for number in range(2, batch + 1) if batch % number == 0)
        accumulation = "" if train.GLOBAL_BATCH else f" TRAIN.ACCUM_ITER={factor * train.ACCUM_ITER}"
        if batch > factor or not train.mixes:  # mixing takes two images
            ways.append(f"DATA.BATCH_SIZE={batch // factor}{accumulation}: the same images per update, fewer at once")
    if train.GRAD_CHECKPOINT == "none" and not validating:
        ways.append("TRAIN.GRAD_CHECKPOINT=blocks: fewer saved activations; the backward pass recomputes them")
    if not config.AMP.ENABLED and amp_may_gain(device):
        ways.append(f"{HALF.get(device.type, '-amp')}: most activations take half the memory")
    own_size = validating and config.DATA.BATCH_SIZE_EVAL is not None
    if not found and not own_size and config.DIST.STRATEGY != "fsdp":
        ways.append("DATA.BATCH_SIZE=auto: finds how many images fit")
    return ways
