"""MODEL.UNFREEZE_EPOCH: frozen weights are trained from the start of an epoch on.

The optimiser has them from the first update. Without a gradient it leaves a weight as it is, weight decay included, so
nothing happens to them before, and their moments begin with their first gradient. All else that depends on which
weights are trained is made anew, as a run that is resumed at this epoch makes it.
"""

from __future__ import annotations

import gc

from engine.parallel.fsdp import read_trained_weights
from engine.update import Parts
from engine.wrapping import wrap
from models import count_parameters, unfreeze
from utils.config import Config
from utils.log import log


def unfreeze_if_due(parts: Parts, config: Config, epoch: int) -> bool:
    """Train all weights if it is time. Returns whether this changed the model. A collective call."""
    names = [] if config.MODEL.frozen_in(epoch) else unfreeze(parts.model)
    if not names:
        return False
    log.info(_words(parts, names, epoch))
    if parts.sharding is not None:
        read_trained_weights(parts.model)
    elif parts.half_copy is not None:
        parts.set_up_forward()  # a copy has gradients only where its master had them when it was made
    else:
        parts.forward = parts.model
        gc.collect()  # DDP takes its hooks off the weights when it is gone
    wrap(parts, config)
    if parts.compiled is not None:
        parts.compiled.start()
    return True


def _words(parts: Parts, names: list[str], epoch: int) -> str:
    thawed = {id(parts.model.get_parameter(name)) for name in names}
    groups = [group for group in parts.optimizer.param_groups if thawed & set(map(id, group["params"]))]
    ends = (f"{end(float(group['lr']) for group in groups):.3e}" for end in (min, max))
    number = sum(parts.model.get_parameter(name).numel() for name in names)
    return (
        f"MODEL.UNFREEZE_EPOCH: from epoch {epoch} on, {len(names)} frozen tensors ({number:,} parameters) are "
        f"trained too, at learning rate {' to '.join(dict.fromkeys(ends))}; {count_parameters(parts.model)[1]:,} "
        "parameters are trained in all."
    )
