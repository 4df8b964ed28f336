#!/usr/bin/env python3
"""List the kernels that torch's compiler generates for an update on an H200, with the bytes they move. Needs no GPU.

    python bench/compiled_kernels.py                                         # ViT-B/16, batch 256, bf16, as benchmarked
    python bench/compiled_kernels.py -kernels MODEL.DEPTH=2                  # every kernel, in order
    python bench/compiled_kernels.py MODEL.DROPOUT=0.1                       # with other settings of a run
    python bench/compiled_kernels.py -inductor triton.mix_order_reduction=0  # with other settings of the compiler
    python bench/compiled_kernels.py -json docs/results/compiled_kernels.json

The engine builds the training with tensors that have shapes but no values (torch's FakeTensorMode) on a pretended GPU,
and TRAIN.COMPILE=whole compiles it up to the generated code, which is not run. So nothing is measured: bytes are those
that a kernel must read and write once, without the GPU's caches, and milliseconds are bytes over 4.8 TB/s. The
kernels of attention and MLPs are those that an H200 chose (docs/results/gpu_base.json), unless SPEED names others.
What the compiler chooses by timing, such as the tiles of a kernel, cannot be seen. Needs Linux, gcc and triton.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

# Autograd's engine asks the accelerator for its streams, in C++, and there is none. With these two answers it asks for
# no streams. They must be loaded before torch, in whose libraries they take the place of its own.
NO_ACCELERATOR = """
unsigned short _ZN2at11accelerator14getAcceleratorEb(_Bool checked) { return 0; }
_Bool _ZN2at11accelerator13isAcceleratorEN3c1010DeviceTypeE(signed char type) { return 0; }
"""
BYTES_PER_SECOND = 4.8e12
"""Memory of an H200"""
H200 = {"name": "NVIDIA H200", "major": 9, "minor": 0, "multi_processor_count": 132, "total_memory": 150_000_000_000}
H200 |= {"regs_per_multiprocessor": 65536, "max_threads_per_multi_processor": 2048, "max_threads_per_block": 1024}
H200 |= {"shared_memory_per_block": 49152, "shared_memory_per_block_optin": 232448, "warp_size": 32}
H200 |= {"shared_memory_per_multiprocessor": 233472, "L2_cache_size": 62914560, "gcnArchName": "", "uuid": "GPU-none"}
CHOSEN = {"attention": "packed", "linear_patches": True, "fused_mlp": True}
"""Speed-ups that an H200 chose for ViT-B/16"""
RECIPE = "configs/vit_base_patch16_224.yaml"
SETTINGS = {"DATA.DATASET": "synthetic", "DEVICE": "cuda", "AMP.ENABLED": "true", "AMP.DTYPE": "bf16"}
SETTINGS |= {"TRAIN.COMPILE": "whole", "MODEL.DROPOUT": "0"}
MOVES = {"convert_element_type", "_to_copy", "reshape", "view", "permute", "transpose", "slice", "select", "clone"}
MOVES |= {"expand", "squeeze", "unsqueeze"}
"""Operators that compute nothing: a kernel of these alone is a cast or a copy"""
EMBEDDING = "patch embedding"
HEAD = "head and loss"
SMALL = 2**20
"""Bytes of a buffer that is left out where activations are listed"""


@dataclass(frozen=True)
class Buffer:
    """A tensor that a kernel reads or writes, with the bytes of it that the kernel accesses."""

    name: str
    dtype: str
    shape: list[int]
    bytes: int


@dataclass(frozen=True)
class Kernel:
    """A kernel, or a call of a library, of the forward or the backward pass."""

    direction: str
    part: str
    """'block 3', 'patch embedding', or 'head and loss'"""
    kind: str
    """product, attention, own kernel, random, weight cast, cast, copy, reduction or pointwise"""
    what: str
    """Shapes of a product, else operators that are fused into it"""
    reads: list[Buffer]
    writes: list[Buffer]
    flops: int = 0

    @property
    def bytes(self) -> int:
        return sum(buffer.bytes for buffer in self.reads + self.writes)


def pretend_gpu() -> None:
    """Let torch, its compiler and triton take this machine for one with an H200, for the rest of this process."""
    folder = Path(tempfile.mkdtemp())
    (folder / "none.c").write_text(NO_ACCELERATOR)
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", folder / "none.so", folder / "none.c"], check=True)
    ctypes.CDLL(str(folder / "none.so"), ctypes.RTLD_GLOBAL)
    import torch
    from torch._dynamo.device_interface import CudaInterface
    from torch._inductor.fx_passes import joint_graph, post_grad
    from torch._subclasses import fake_tensor
    from triton.backends.compiler import GPUTarget
    from triton.runtime.driver import driver

    gpu = torch.device("cuda", 0)
    fake_tensor.init_gpu_context = lambda _device: None
    torch._C._ensureCUDADeviceGuardSet()
    # The compiler's patterns are traced with real tensors, so this comes before there seems to be a GPU.
    joint_graph.lazy_init(gpu)
    post_grad.lazy_init()
    properties = SimpleNamespace(**H200)
    queries = {"current_device": 0, "device_count": 1, "get_device_properties": properties, "set_device": None}
    queries |= {"synchronize": None, "memory_allocated": 0, "is_bf16_supported": True}
    on_device = {"is_available": True, "is_initialized": True, "get_device_capability": (9, 0), "_lazy_init": None}
    on_device |= {"get_rng_state": torch.zeros(16, dtype=torch.uint8), "set_rng_state": None, "manual_seed": None}
    on_device |= {"manual_seed_all": None, "is_current_stream_capturing": False, "get_device_name": H200["name"]}
    of_interface = {"exchange_device": 0, "maybe_exchange_device": 0, "get_raw_stream": 0}
    target = {"get_current_target": GPUTarget("cuda", 90, 32), "get_active_torch_device": gpu, "is_active": True}
    target |= {"get_current_device": 0, "get_current_stream": 0, "get_device_interface": torch.cuda}
    triton_driver = SimpleNamespace()
    answer(torch.cuda, **queries, **on_device)
    answer(CudaInterface, **queries, **of_interface)
    answer(torch.cuda.device, __enter__=None, __exit__=False)
    answer(torch._C, _cuda_getDevice=0)
    answer(torch.accelerator, is_available=False)
    answer(triton_driver, **target)
    driver.set_active(triton_driver)  # pyright: ignore[reportArgumentType]


def answer(owner: Any, **answers: Any) -> None:
    """Let functions of a module or class return these values, whatever their arguments."""
    for name, value in answers.items():
        function = lambda *_, value=value, **__: value  # noqa: E731
        setattr(owner, name, staticmethod(function) if isinstance(owner, type) else function)


class Compiled(Exception):
    """Ends the first call of compiled code, when both passes are compiled."""


class NotRun(SimpleNamespace):
    """Stands in for the module of generated code."""

    def call(self, *_: Any) -> None:
        raise Compiled


def read_kernels(config: Any, compiler: dict[str, Any]) -> list[Kernel]:
    """Compile the forward and the backward pass of a micro-batch, and return their kernels in order."""
    import torch
    import torch._inductor.config as inductor
    from torch._inductor.codecache import PyCodeCache
    from torch._inductor.scheduler import Scheduler
    from torch._subclasses.fake_tensor import FakeTensorMode

    from datasets import Batch
    from engine.amp.precision import Precision
    from engine.compile.compiled import WHOLE, Compiling
    from engine.inputs.batches import Inputs
    from engine.setup import TunedModel, build_train_state
    from engine.speed.speedup import BuiltModel
    from engine.speed.tuning import speedups
    from models.build import build_model
    from utils.distributed.world import ALONE

    device = torch.device("cuda", 0)
    kernels: list[Kernel] = []
    generate = Scheduler.codegen

    def codegen(scheduler: Scheduler) -> None:
        generate(scheduler)
        kernels.extend(kernels_of(scheduler))

    Scheduler.codegen = codegen
    PyCodeCache.load_by_key_path = lambda key, path, *_, **__: NotRun(__file__=path, key=key)  # pyright: ignore[reportAttributeAccessIssue]
    # Constants are folded by computing them, which needs a GPU. Here, only the loss has some.
    settings = {"force_disable_caches": True, "compile_threads": 1, "joint_graph_constant_folding": False, **compiler}
    model = build_model(config.MODEL, config.DATA.IMAGE_SIZE, config.DATA.IMAGE_CHANNELS)
    inputs = Inputs(config.DATA)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode, inductor.patch(settings):
        for module in (*model.modules(), *inputs.modules()):
            for name, weight in module.named_parameters(recurse=False):
                module._parameters[name] = torch.nn.Parameter(mode.from_tensor(weight.detach()).to(device))
            for name, buffer in module.named_buffers(recurse=False):
                module._buffers[name] = mode.from_tensor(buffer).to(device)
        precision = Precision(config.AMP, device)
        built = BuiltModel(config, model, inputs, precision, ALONE, {})
        for speedup in speedups(config, precision):
            value = CHOSEN.get(speedup.key, False)
            if speedup.key == "attention" and config.attention != "auto":
                value = config.attention
            if value:
                speedup.apply(built, value)
        state = build_train_state(config, ALONE, TunedModel(model, inputs, precision), per_epoch=10)
        compiling = state.callback(Compiling)
        assert compiling is not None, "TRAIN.COMPILE is none"
        compiling.how = WHOLE
        model.train()
        state.assemble()
        count = config.DATA.BATCH_SIZE
        labels = torch.zeros(count, dtype=torch.int64, device=device)
        images = torch.zeros(count, *config.DATA.shape, dtype=torch.uint8, device=device)
        try:
            state.compute(Batch(images, labels, labels))
        except Compiled:
            pass
    return kernels


def kernels_of(scheduler: Any) -> Iterator[Kernel]:
    """Yield the kernels of a graph whose code was generated. `scheduler`: torch's, with the fused nodes."""
    from torch._inductor import ir
    from torch._inductor.virtualized import V

    graph = V.graph
    direction = "backward" if graph.is_backward else "forward"
    # What the forward pass saves has other names in the backward pass: those of the traced graph.
    outputs = graph.module.graph.output_node().args[0]
    names = {}
    for ours, traced in zip(graph.graph_outputs, outputs, strict=True):
        if traced is not None and not graph.is_backward:
            names[ours.get_name()] = traced.name
    results = set(graph.get_output_names())

    def buffers(accesses: dict[str, int]) -> list[Buffer]:
        found = []
        for name, size in accesses.items():
            tensor = graph.get_buffer(name) if name in graph.name_to_buffer else graph.graph_inputs[name]
            layout = None if isinstance(tensor.get_output_spec(), ir.MultiOutputLayout) else tensor
            dtype = "several" if layout is None else str(tensor.get_dtype()).removeprefix("torch.")
            shape = [] if layout is None else [int(side) for side in tensor.get_size()]
            found.append(Buffer(names.get(name, name), dtype, shape, size))
        return sorted(found, key=lambda buffer: -buffer.bytes)

    for node in scheduler.nodes:
        accesses = node.get_read_write_buffer_accesses(include_reads=True, include_writes=False)
        own = node.get_buffer_names()  # what a kernel writes it has in registers, and does not read
        reads = buffers({name: size for name, size in accesses.items() if name not in own})
        writes = buffers(node.get_read_write_buffer_accesses(include_reads=False, include_writes=True))
        if not reads and not writes:
            continue
        origins = [origin for one in node.get_nodes() if one.node is not None for origin in one.node.get_origins()]
        operators = sorted({str(origin.target).partition(".")[2].partition(".")[0] for origin in origins})
        called = str(getattr(node.node, "python_kernel_name", None) or "")
        flops = 0
        what = ", ".join(operators)
        only_moves = MOVES.issuperset(operators)
        if called.endswith(("mm", "convolution")):
            kind = "product"
            first, second = [[int(side) for side in one.get_size()] for one in node.node.inputs[-2:]]
            what = f"{called.rpartition('.')[2]} {' x '.join(map(str, first))} by {' x '.join(map(str, second))}"
            flops = 2 * first[0] * first[1] * second[-1]
        elif called:
            what = called.removesuffix(".default").removeprefix("torch.ops.")
            kind = "attention" if "attention" in called else "random" if "rand" in called else "own kernel"
        elif only_moves and {one.dtype for one in reads} != {one.dtype for one in writes}:
            inputs_only = all(one.name in graph.graph_inputs for one in reads)
            is_result = any(name in results for name in node.get_buffer_names())
            is_of_weight = is_result if graph.is_backward else inputs_only
            kind = "weight cast" if is_of_weight else "cast"
        else:
            kind = "copy" if only_moves else "reduction" if node.is_reduction() else "pointwise"
        yield Kernel(direction, part_of(origins, direction), kind, what, reads, writes, flops)


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
    # Forward, a kernel may add the results of earlier blocks; backward, it belongs to the last block that it reaches.
    return f"block {max(blocks) if direction == 'forward' else min(blocks)}"


def passes_over_weights(weights: int) -> list[dict[str, Any]]:
    """Return what an update does outside the compiled graph, with the bytes it moves: counted, not read from code.

    `weights`: number of weights, which are in fp32 like their gradients and both moments of AdamW.
    """
    size = 4 * weights
    return [
        {"what": "gradient norm: reads gradients", "bytes": size},
        {"what": "clipping: reads and writes gradients", "bytes": 2 * size},
        {"what": "fused AdamW: reads weights, gradients and moments, writes weights and moments", "bytes": 7 * size},
        {"what": "EMA: reads weights and averages, writes averages", "bytes": 3 * size},
    ]


def summed(kernels: list[Kernel]) -> list[dict[str, Any]]:
    """Return a row per part and direction, with the number and the bytes of its kernels by their kind."""
    rows: dict[tuple[str, str], list[Kernel]] = defaultdict(list)
    for kernel in kernels:
        rows[kernel.part, kernel.direction].append(kernel)
    table = []
    for (part, direction), own in rows.items():
        by_kind: dict[str, list[int]] = defaultdict(lambda: [0, 0])
        for kernel in own:
            by_kind[kernel.kind][0] += 1
            by_kind[kernel.kind][1] += kernel.bytes
        between = [kernel for kernel in own if kernel.kind != "product"]
        row = {"part": part, "direction": direction, "gigaflops": round(sum(kernel.flops for kernel in own) / 1e9, 1)}
        row |= {"products": by_kind["product"][0], "bytes_of_products": by_kind["product"][1]}
        row |= {"kernels_between": len(between), "bytes_between": sum(kernel.bytes for kernel in between)}
        row["kinds"] = {kind: {"kernels": count, "bytes": size} for kind, (count, size) in sorted(by_kind.items())}
        table.append(row)
    return table


def shared_activations(kernels: list[Kernel]) -> dict[str, list[str]]:
    """Return the activations that several generated kernels read or write, with what each does with them."""
    uses: dict[str, list[str]] = defaultdict(list)
    for kernel in kernels:
        if kernel.kind not in ("cast", "copy", "reduction", "pointwise"):
            continue
        for verb, buffers in (("reads", kernel.reads), ("writes", kernel.writes)):
            for buffer in buffers:
                if buffer.bytes >= SMALL:
                    is_saved = not buffer.name.startswith("buf")
                    name = buffer.name if is_saved else f"{kernel.direction} {buffer.name}"
                    shape = "x".join(map(str, buffer.shape))
                    uses[f"{name}, {buffer.dtype} {shape}"].append(
                        f"{kernel.direction} {kernel.part}: {kernel.kind} {verb}"
                    )
    return {name: users for name, users in uses.items() if len(users) > 1}


def milliseconds(size: float) -> float:
    return round(1000 * size / BYTES_PER_SECOND, 3)


def show(rows: list[dict[str, Any]], outside: list[dict[str, Any]]) -> None:
    """Print the table: a row per part and direction, and the passes over all weights."""
    print("| part | direction | products | GFLOP | GB of products | other kernels | GB of these | ms at 4.8 TB/s |")
    print("|---|---|---|---|---|---|---|---|")
    for row in rows:
        size = row["bytes_between"]
        cells = [row["part"], row["direction"], row["products"], f"{row['gigaflops']:,.0f}"]
        cells += [f"{row['bytes_of_products'] / 1e9:.2f}", row["kernels_between"], f"{size / 1e9:.2f}"]
        print("|", " | ".join(map(str, [*cells, milliseconds(size)])), "|")
    for one in outside:
        print(f"| {one['what']} | | | | | | {one['bytes'] / 1e9:.2f} | {milliseconds(one['bytes'])} |")
    total = sum(row["bytes_between"] for row in rows)
    products = sum(row["gigaflops"] for row in rows)
    print(
        f"\nForward and backward: {products / 1000:.1f} TFLOP in products; {total / 1e9:.1f} GB between them, ", end=""
    )
    print(f"{milliseconds(total)} ms at 4.8 TB/s")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE", help="settings of the run")
    parser.add_argument("-cfg", default=str(ROOT / RECIPE), help=f"recipe (default {RECIPE})")
    parser.add_argument("-inductor", action="append", default=[], metavar="KEY=VALUE", help="setting of the compiler")
    parser.add_argument("-kernels", action="store_true", help="print every kernel")
    parser.add_argument("-json", type=Path, metavar="FILE", help="write all kernels to this file")
    asked = parser.parse_args()
    pretend_gpu()
    from models.build import build_without_weights
    from models.parts import count_parameters
    from utils.config import load_config
    from utils.record.run_folder import versions

    words = SETTINGS | dict(word.split("=", 1) for word in asked.settings)
    compiler = {}
    for word in asked.inductor:
        key, _, value = word.partition("=")
        compiler[key] = json.loads(value)
    config = load_config(asked.cfg, words=words).config
    kernels = read_kernels(config, compiler)
    rows = summed(kernels)
    model = build_without_weights(config.MODEL, config.DATA.IMAGE_SIZE, config.DATA.IMAGE_CHANNELS)
    outside = passes_over_weights(count_parameters(model)[1])
    if asked.kernels:
        for kernel in kernels:
            written = ", ".join(f"{one.name} {one.dtype} {one.shape}" for one in kernel.writes)
            size = f"{kernel.bytes / 1e6:.1f} MB"
            print(f"{kernel.direction}, {kernel.part}: {kernel.kind} ({kernel.what}) {size} -> {written}")
    show(rows, outside)
    if asked.json is not None:
        result = {
            "about": "read from generated code on a pretended GPU; nothing was run or timed",
            "command": " ".join(["python bench/compiled_kernels.py", *sys.argv[1:]]),
            "versions": versions() | {"triton": version("triton")},
            "bytes_per_second": BYTES_PER_SECOND,
            "settings": words,
            "compiler": compiler,
            "rows": rows,
            "outside_the_graph": outside,
            "shared_activations": shared_activations(kernels),
            "kernels": [asdict(kernel) | {"bytes": kernel.bytes} for kernel in kernels],
        }
        asked.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
