"""The repeated blocks of a model."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from models.freeze import lies_in


def blocks_of(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Each block with its name, the unit of sharding and compiling; without blocks, each of several like modules."""
    modules = dict(model.named_modules())
    rows = {name: module for name, module in modules.items() if name.rpartition(".")[2] == "blocks"}
    found = {n: m for n, m in (rows or modules).items() if isinstance(m, nn.Sequential | nn.ModuleList) and _alike(m)}
    taken: list[str] = []
    for name, row in found.items():
        if lies_in(name, taken):
            continue
        for number, unit in row.named_children():
            if not isinstance(unit, nn.ModuleList | nn.ModuleDict):  # nobody calls these themselves
                taken.append(f"{name}.{number}" if name else number)
                yield taken[-1], unit


def _alike(row: nn.Module) -> bool:
    kinds = [type(child) for child in row.children() if any(True for _ in child.parameters())]
    return bool(kinds) and len(set(kinds)) == 1 and len(kinds) == len(list(row.children()))
