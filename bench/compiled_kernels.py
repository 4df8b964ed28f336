#!/usr/bin/env python3
"""List the kernels that torch's compiler generates for an update on an H200, with the bytes they move. Needs no GPU.

    python bench/compiled_kernels.py                                         # ViT-B/16, batch 256, bf16, as benchmarked
    python bench/compiled_kernels.py -kernels MODEL.DEPTH=2                  # every kernel, in order
    python bench/compiled_kernels.py MODEL.DROPOUT=0.1                       # with other settings of a run
    python bench/compiled_kernels.py -inductor triton.mix_order_reduction=0  # with other settings of the compiler
    python bench/compiled_kernels.py -name rewritten -json docs/results/compiled_kernels.json

The engine builds the training with tensors that have shapes but no values, on a pretended GPU, and TRAIN.COMPILE=whole
compiles it up to the generated code, which is not run. So nothing is measured: bytes are those that a kernel must read
and write once, without the GPU's caches, and milliseconds are bytes over 4.8 TB/s. The kernels of attention and MLPs
are those that an H200 chose (docs/results/gpu_base.json), unless SPEED names others. What the compiler chooses by
timing, such as the tiles of a kernel, cannot be seen. Needs Linux, gcc and triton.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from bench.pretended_h200 import compute_on_h200, pretend  # noqa: E402

BYTES_PER_SECOND = 4.8e12  # of the memory of an H200
RECIPE = "configs/vit_base_patch16_224.yaml"
SETTINGS = {"DATA.DATASET": "synthetic", "DEVICE": "cuda", "AMP.ENABLED": "true", "AMP.DTYPE": "bf16"}
SETTINGS |= {"TRAIN.COMPILE": "whole", "MODEL.DROPOUT": "0"}
MOVES = {"convert_element_type", "_to_copy", "reshape", "view", "permute", "transpose", "slice", "select", "clone"}
MOVES |= {"expand", "squeeze", "unsqueeze"}
"""Operators that compute nothing: a kernel of these alone is a cast or a copy"""
EMBEDDING = "patch embedding"
HEAD = "head and loss"
SMALL = 2**20  # bytes; smaller buffers are left out where those that kernels read are listed


@dataclass(frozen=True)
class Buffer:
    """A tensor that a kernel reads or writes, with the bytes of it that the kernel accesses."""

    name: str
    kind: str  # dtype and shape
    bytes: int

    def __str__(self) -> str:
        return f"{self.name} {self.kind} {self.bytes / 1e6:.1f} MB"


@dataclass(frozen=True)
class Kernel:
    """A kernel, or a call of a library, of the forward or the backward pass."""

    direction: str
    part: str
    """'block 3', 'patch embedding', or 'head and loss'"""
    kind: str
    """product, attention, own kernel, dropout, weight cast, cast, copy, reduction or pointwise"""
    what: str
    """Shapes of a product, else operators that are fused into it"""
    reads: list[Buffer]
    writes: list[Buffer]
    flops: int = 0

    @property
    def bytes(self) -> int:
        return sum(buffer.bytes for buffer in self.reads + self.writes)

    def __str__(self) -> str:
        reads = ", ".join(str(buffer) for buffer in self.reads if buffer.bytes >= SMALL)
        writes = ", ".join(str(buffer) for buffer in self.writes)
        return f"{self.direction}, {self.part}: {self.kind} ({self.what}) reads {reads}; writes {writes}"


class Compiled(Exception):
    """Raised by the first call of compiled code, when both passes are compiled."""


class NotRun(SimpleNamespace):
    """A module in place of the generated code. It runs none of that."""

    def call(self, *_: Any) -> None:
        raise Compiled


def read_kernels(config: Any, compiler: dict[str, Any]) -> list[Kernel]:
    """Compile the forward and the backward pass of a micro-batch, and return their kernels in order."""
    import torch._inductor.config as inductor
    from torch._inductor.codecache import PyCodeCache
    from torch._inductor.scheduler import Scheduler

    kernels: list[Kernel] = []
    generate = Scheduler.codegen

    def codegen(scheduler: Scheduler) -> None:
        generate(scheduler)
        kernels.extend(kernels_of(scheduler))

    Scheduler.codegen = codegen  # pyright: ignore[reportAttributeAccessIssue]
    PyCodeCache.load_by_key_path = lambda key, path, *_, **__: NotRun(__file__=path, key=key)  # pyright: ignore[reportAttributeAccessIssue]
    # Constants are folded by computing them, which needs a GPU. Here, only the loss has some.
    settings = {"force_disable_caches": True, "compile_threads": 1, "joint_graph_constant_folding": False, **compiler}
    with inductor.patch(settings), contextlib.suppress(Compiled):
        compute_on_h200(config)
    return kernels


def kernels_of(scheduler: Any) -> Iterator[Kernel]:
    """Yield the kernels of a graph whose code was generated. `scheduler`: torch's, with the fused nodes."""
    from torch._inductor.dependencies import WeakDep
    from torch._inductor.virtualized import V

    graph: Any = V.graph
    direction = "backward" if graph.is_backward else "forward"
    names = names_in_backward(graph)
    for node in scheduler.nodes:
        accesses = node.get_read_write_buffer_accesses(include_reads=True, include_writes=False)
        own = node.get_buffer_names()  # a kernel has in registers what it writes
        needed = {dep.name for dep in node.read_writes.reads if not isinstance(dep, WeakDep)}  # weak ones only order
        reads = buffers_of({name: size for name, size in accesses.items() if name in needed - own}, graph, names)
        written = node.get_read_write_buffer_accesses(include_reads=False, include_writes=True)
        writes = buffers_of(written, graph, names)
        if not reads and not writes:
            continue
        origins = [origin for one in node.get_nodes() if one.node is not None for origin in one.node.get_origins()]
        part = part_of(origins, direction)
        called = str(getattr(node.node, "python_kernel_name", None) or "").removesuffix(".default")
        if called.endswith("mm"):
            first, second = [[int(side) for side in one.get_size()] for one in node.node.inputs[-2:]]
            what = f"{called.rpartition('.')[2]} {' x '.join(map(str, first))} by {' x '.join(map(str, second))}"
            flops = 2 * first[0] * first[1] * second[-1]
            yield Kernel(direction, part, "product", what, reads, writes, flops)
        elif called:
            yield Kernel(direction, part, kind_of_call(called), called.removeprefix("torch.ops."), reads, writes)
        else:
            operators = sorted({str(origin.target).partition(".")[2].partition(".")[0] for origin in origins})
            kind = "reduction" if node.is_reduction() else "pointwise"
            if MOVES.issuperset(operators):
                kind = kind_of_move(reads, writes, own, graph)
            yield Kernel(direction, part, kind, ", ".join(operators), reads, writes)


def names_in_backward(graph: Any) -> dict[str, str]:
    """Return what the backward pass calls the results of a forward graph: by the names of the traced graph."""
    names = dict[str, str]()
    if graph.is_backward:
        return names
    for ours, traced in zip(graph.graph_outputs, graph.module.graph.output_node().args[0], strict=True):
        if traced is not None:
            names[ours.get_name()] = traced.name
    return names


def buffers_of(accesses: dict[str, int], graph: Any, names: dict[str, str]) -> list[Buffer]:
    """Describe buffers that a kernel reads or writes, the largest first. `accesses`: their names and bytes."""
    from torch._inductor import ir

    found = []
    for name, size in accesses.items():
        tensor = graph.get_buffer(name) if name in graph.name_to_buffer else graph.graph_inputs[name]
        kind = "several"
        if not isinstance(tensor.get_output_spec(), ir.MultiOutputLayout):
            shape = "x".join(str(side) for side in tensor.get_size())
            kind = f"{str(tensor.get_dtype()).removeprefix('torch.')} {shape}"
        found.append(Buffer(names.get(name, name), kind, size))
    return sorted(found, key=lambda buffer: -buffer.bytes)


def kind_of_call(called: str) -> str:
    """Return the kind of a kernel that is a call of an operator, other than a product."""
    for kind in ("dropout", "attention"):
        if kind in called:
            return kind
    return "own kernel"


def kind_of_move(reads: list[Buffer], writes: list[Buffer], own: Collection[str], graph: Any) -> str:
    """Return the kind of a kernel that only moves or casts. `own`: names of the buffers that it writes.

    A weight's cast begins at an input of the forward pass, and that of its gradient ends at a result of the backward
    pass.
    """
    if {one.kind.split()[0] for one in reads} == {one.kind.split()[0] for one in writes}:
        return "copy"
    if graph.is_backward:
        is_of_weight = not set(graph.get_output_names()).isdisjoint(own)
    else:
        is_of_weight = all(one.name in graph.graph_inputs for one in reads)
    return "weight cast" if is_of_weight else "cast"


def part_of(origins: Iterable[Any], direction: str) -> str:
    """Return the part of the model that a kernel belongs to, of which its operators' modules are."""
    paths: set[str] = set()
    for origin in origins:
        stack = origin.meta.get("fwd_nn_module_stack") or origin.meta.get("nn_module_stack") or {}
        if stack:
            where = [path for path, _ in stack.values()][-1]  # such as L['forward'].blocks.0.norm1
            paths.add(where.replace("L['forward'].", "").replace("L['criterion']", "criterion"))
    blocks = {int(path.split(".")[1]) for path in paths if path.startswith("blocks.")}
    is_head = any(path.startswith(("norm", "head", "fc_norm", "criterion")) for path in paths)
    if is_head and (direction == "forward" or not blocks):
        return HEAD
    if not blocks:
        return EMBEDDING
    in_first_block = {path for path in paths if path.startswith("blocks.0")}
    is_input = "L['forward']" in paths and in_first_block == {"blocks.0"}  # of the first block
    if direction == "backward" and ("patch_embed.proj" in paths or is_input):
        return EMBEDDING
    return f"block {max(blocks)}"  # which may read the results of blocks before it


OUTSIDE = {
    "gradient norm: reads gradients": 1,
    "clipping: reads and writes gradients": 2,
    "fused AdamW: reads weights, gradients and moments, writes weights and moments": 7,
    "EMA: reads weights and averages, writes averages": 3,
}
"""Passes of an update over all weights outside the graph, and how many times 4 bytes per weight they move. Counted."""


def summed(kernels: list[Kernel]) -> list[dict[str, Any]]:
    """Return a row per part and direction, with the number and the bytes of its kernels by their kind."""
    rows: dict[tuple[str, str], list[Kernel]] = defaultdict(list)
    for kernel in kernels:
        rows[kernel.part, kernel.direction].append(kernel)
    table = []
    for (part, direction), own in rows.items():
        bytes_of = dict.fromkeys(sorted({kernel.kind for kernel in own}), 0)
        for kernel in own:
            bytes_of[kernel.kind] += kernel.bytes
        between = [kernel for kernel in own if kernel.kind != "product"]
        row: dict[str, Any] = {"part": part, "direction": direction, "products": len(own) - len(between)}
        row["gigaflops"] = round(sum(kernel.flops for kernel in own) / 1e9, 1)
        row["kernels_between"] = len(between)
        row["bytes_between"] = sum(kernel.bytes for kernel in between)
        table.append(row | {"bytes": bytes_of})
    return table


def shared_activations(kernels: list[Kernel]) -> dict[str, list[str]]:
    """Return the activations that several generated kernels of a direction access, with what each does with them."""
    uses: dict[str, list[str]] = defaultdict(list)
    for kernel in kernels:
        if kernel.kind in ("cast", "copy", "reduction", "pointwise"):
            for verb, buffers in (("reads", kernel.reads), ("writes", kernel.writes)):
                for buffer in buffers:
                    if buffer.bytes >= SMALL:
                        uses[f"{kernel.direction} {buffer}"].append(f"{kernel.part}: {kernel.kind} {verb}")
    return {name: users for name, users in uses.items() if len(users) > 1}


def milliseconds(size: float) -> float:
    return round(1000 * size / BYTES_PER_SECOND, 3)


def show(rows: list[dict[str, Any]], outside: dict[str, int]) -> None:
    """Print the table: a row per part and direction, and the passes over all weights."""
    print("| part | direction | products | GFLOP | other kernels | GB of these | ms at 4.8 TB/s |")
    print("|---|---|---|---|---|---|---|")
    for row in rows:
        size = row["bytes_between"]
        cells = [row["part"], row["direction"], row["products"], f"{row['gigaflops']:,.0f}", row["kernels_between"]]
        print("|", " | ".join(map(str, [*cells, f"{size / 1e9:.2f}", milliseconds(size)])), "|")
    for what, size in outside.items():
        print(f"| {what} | | | | | {size / 1e9:.2f} | {milliseconds(size)} |")
    total = sum(row["bytes_between"] for row in rows)
    products = sum(row["gigaflops"] for row in rows) / 1000
    print(f"\nForward and backward: {products:.1f} TFLOP in products; between them", end=" ")
    print(f"{total / 1e9:.1f} GB, {milliseconds(total)} ms at 4.8 TB/s")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE", help="settings of the run")
    parser.add_argument("-cfg", default=str(ROOT / RECIPE), help=f"recipe (default {RECIPE})")
    parser.add_argument("-inductor", action="append", default=[], metavar="KEY=VALUE", help="setting of the compiler")
    parser.add_argument("-kernels", action="store_true", help="print every kernel")
    parser.add_argument("-json", type=Path, metavar="FILE", help="add the result to this file")
    parser.add_argument("-name", default="kernels", help="name of the result in the file")
    asked = parser.parse_intermixed_args()
    pretend()
    from models.build import build_without_weights
    from models.parts import count_parameters
    from utils.config import load_config
    from utils.record.run_folder import versions

    words = SETTINGS | dict(word.split("=", 1) for word in asked.settings)
    compiler = {key: json.loads(value) for key, value in (word.split("=", 1) for word in asked.inductor)}
    config = load_config(asked.cfg, words=words).config
    kernels = read_kernels(config, compiler)
    rows = summed(kernels)
    model = build_without_weights(config.MODEL, config.DATA.IMAGE_SIZE, config.DATA.IMAGE_CHANNELS)
    outside = {what: 4 * times * count_parameters(model)[1] for what, times in OUTSIDE.items()}
    if asked.kernels:
        print("\n".join(map(str, kernels)))
    show(rows, outside)
    if asked.json is not None:
        repeated = {f"block {number}" for number in range(1, int(config.MODEL.DEPTH or 1) - 2)}  # all but the last two
        kept = [kernel for kernel in kernels if kernel.part not in repeated]
        results = json.loads(asked.json.read_text(encoding="utf-8")) if asked.json.exists() else {}
        results[asked.name] = {
            "about": "read from generated code for a pretended H200; nothing was run or timed",
            "versions": versions() | {"triton": version("triton")},
            "settings": words,
            "compiler": compiler,
            "rows": rows,
            "outside_the_graph": outside,
            "shared_activations_of_some_blocks": shared_activations(kept),
            "kernels_of_some_blocks": [str(kernel) for kernel in kept],
        }
        asked.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
