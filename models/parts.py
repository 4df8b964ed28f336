"""Parts of a model by their names: its blocks, its classifiers, what is trained and what is frozen."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from vitamp.checkpoints import ADAPTER

BATCH_NORM = (nn.modules.batchnorm._BatchNorm,)
BASE = "base_names"
"""Attribute of a model with adapters (MODEL.LORA): the names of its frozen weights."""


def count_parameters(module: nn.Module) -> tuple[int, int]:
    """Numbers of all and of trainable parameters."""
    total = sum(weight.numel() for weight in module.parameters())
    trainable = sum(weight.numel() for weight in module.parameters() if weight.requires_grad)
    return total, trainable


def has_weights(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


@contextmanager
def in_eval_mode(model: nn.Module) -> Iterator[None]:
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)


def frozen_weights(model: nn.Module) -> list[str]:
    """Names of the weights that are not trained."""
    return [name for name, weight in model.named_parameters() if not weight.requires_grad]


def base_weights(model: nn.Module) -> dict[str, Tensor]:
    """The frozen weights of a model with adapters, which its checkpoints leave out; empty for any other model."""
    return {name: model.get_parameter(name).detach() for name in vars(model).get(BASE, ())}


def has_adapters(module: nn.Module) -> bool:
    """Whether a layer has adapters of its own (models/lora.py)."""
    return any(name.startswith(ADAPTER) for name, _ in module.named_parameters(recurse=False))


def classifiers(model: nn.Module) -> tuple[str, ...]:
    """Names of the classifier modules, as timm's models report them: one, or two in a distilled model."""
    names = {id(module): name for name, module in model.named_modules() if has_weights(module)}
    get = getattr(model, "get_classifier", None)
    heads = get() if get is not None else None
    if not isinstance(heads, tuple):
        heads = (heads,)
    known = tuple(names[id(head)] for head in heads if id(head) in names)
    if known:
        return known
    return tuple(name for name in names_in_cfg(model, "classifier") if name in names.values())


def overlapping_convolutions(model: nn.Module) -> list[nn.Conv2d]:
    """Those whose windows overlap; a convolution without is a matrix product."""
    found = []
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            steps = zip(module.kernel_size, module.stride, strict=True)
            if any(size > step for size, step in steps):
                found.append(module)
    return found


def is_convolutional(model: nn.Module) -> bool:
    """Whether it has convolutions with batch norms and no attention, as ResNet and EfficientNet, but not ConvNeXt."""
    attends = any("Att" in type(module).__name__ for module in model.modules())  # Attention, WindowAttn
    normed = any(isinstance(module, BATCH_NORM) for module in model.modules())
    return normed and not attends and bool(overlapping_convolutions(model))


def convolves_by_channel(model: nn.Module) -> bool:
    """Whether it has depthwise convolutions with batch norms, as EfficientNet and MobileNet have."""
    depthwise = any(one.groups == one.in_channels > 1 for one in overlapping_convolutions(model))
    return depthwise and any(isinstance(module, BATCH_NORM) for module in model.modules())


def pretrained_cfg(model: nn.Module) -> dict[str, Any]:
    """timm's settings of a model's weights; empty for models that are not timm's."""
    return vars(model).get("pretrained_cfg") or {}


def names_in_cfg(model: nn.Module, key: str) -> tuple[str, ...]:
    """Names of the modules under `classifier` or `first_conv` in timm's settings."""
    names = pretrained_cfg(model).get(key) or ()
    return (names,) if isinstance(names, str) else tuple(names)


def is_inside(name: str, modules: Iterable[str]) -> bool:
    """Whether a weight or module is one of these modules or inside one."""
    return any(name == module or name.startswith(f"{module}.") for module in modules)


def blocks_of(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Each block with its name, the unit of sharding and compiling.

    In a model without `blocks`, the modules of every sequence of one type count as blocks.
    """
    modules = dict(model.named_modules())
    named = {name: module for name, module in modules.items() if name.rpartition(".")[2] == "blocks"}
    yielded: list[str] = []
    for name, sequence in (named or modules).items():
        if not _is_uniform(sequence) or is_inside(name, yielded):
            continue
        for number, block in sequence.named_children():
            if isinstance(block, nn.ModuleList | nn.ModuleDict):  # these are never called themselves
                continue
            block_name = f"{name}.{number}" if name else number
            yielded.append(block_name)
            yield block_name, block


def _is_uniform(sequence: nn.Module) -> bool:
    """Whether this is a sequence whose modules all have weights and are of one type."""
    if not isinstance(sequence, nn.Sequential | nn.ModuleList):
        return False
    children = list(sequence.children())
    types = {type(child) for child in children}
    return len(types) == 1 and all(has_weights(child) for child in children)
