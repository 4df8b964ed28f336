"""The repeated blocks of a model."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from models.freeze import is_inside


def blocks_of(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Each block with its name, the unit of sharding and compiling.

    In a model without `blocks`, the modules of every sequence of one type count as blocks.
    """
    modules = dict(model.named_modules())
    named = {name: module for name, module in modules.items() if name.rpartition(".")[2] == "blocks"}
    sequences = {
        name: module
        for name, module in (named or modules).items()
        if isinstance(module, nn.Sequential | nn.ModuleList) and _is_uniform(module)
    }
    yielded: list[str] = []
    for name, sequence in sequences.items():
        if is_inside(name, yielded):
            continue
        for number, block in sequence.named_children():
            if not isinstance(block, nn.ModuleList | nn.ModuleDict):  # these are never called themselves
                yielded.append(f"{name}.{number}" if name else number)
                yield yielded[-1], block


def _is_uniform(sequence: nn.Module) -> bool:
    """Whether all children have parameters and are of one type."""
    types = [type(child) for child in sequence.children() if any(True for _ in child.parameters())]
    return bool(types) and len(set(types)) == 1 and len(types) == len(list(sequence.children()))
