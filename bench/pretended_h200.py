"""Lets torch's compiler take a machine without a GPU for one with an H200, up to the generated code.

`pretend` must be called before anything imports torch, and holds for the rest of the process. Tensors need shapes
only: use torch's FakeTensorMode. tests/pretended_gpu.py is for runs; its tensors have values, and nothing compiles.
"""

from __future__ import annotations

import ctypes
import subprocess
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

# Autograd's engine asks the accelerator for its streams, in C++, and there is none. With these two answers it asks for
# no streams. They are loaded before torch, and so take the place of the functions of that name in its libraries.
NO_ACCELERATOR = """
unsigned short _ZN2at11accelerator14getAcceleratorEb(_Bool checked) { return 0; }
_Bool _ZN2at11accelerator13isAcceleratorEN3c1010DeviceTypeE(signed char type) { return 0; }
"""
H200 = SimpleNamespace(
    name="NVIDIA H200",
    major=9,
    minor=0,
    multi_processor_count=132,
    total_memory=150_000_000_000,
    regs_per_multiprocessor=65536,
    max_threads_per_multi_processor=2048,
    max_threads_per_block=1024,
    shared_memory_per_block=49152,
    shared_memory_per_block_optin=232448,
    shared_memory_per_multiprocessor=233472,
    L2_cache_size=62914560,
    warp_size=32,
    gcnArchName="",
    uuid="GPU-none",
)
CHOSEN = {"attention": "packed", "linear_patches": True, "fused_mlp": True}
"""Speed-ups that an H200 chose for ViT-B/16 (docs/results/gpu_base.json)"""


def pretend() -> None:
    """Replace what torch, its compiler and triton ask a GPU for. Needs gcc."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "none.c"
        library = Path(folder) / "none.so"
        source.write_text(NO_ACCELERATOR, encoding="utf-8")
        subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, source], check=True)
        ctypes.CDLL(str(library), ctypes.RTLD_GLOBAL)
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

    queries: dict[str, Any] = {"current_device": 0, "device_count": 1, "get_device_properties": H200}
    queries |= {"set_device": None, "synchronize": None, "memory_allocated": 0, "is_bf16_supported": True}
    state: dict[str, Any] = {"is_available": True, "is_initialized": True, "_lazy_init": None}
    state |= {"get_device_capability": (9, 0), "get_device_name": H200.name, "is_current_stream_capturing": False}
    random = {"get_rng_state": torch.zeros(16, dtype=torch.uint8), "set_rng_state": None, "manual_seed": None}
    triton_driver: Any = SimpleNamespace()
    answer(torch.cuda, **queries, **state, **random, manual_seed_all=None)
    answer(CudaInterface, **queries, exchange_device=0, maybe_exchange_device=0, get_raw_stream=0)
    answer(torch.cuda.device, __enter__=None, __exit__=False)
    answer(torch._C, _cuda_getDevice=0)
    answer(torch.accelerator, is_available=False)
    answer(triton_driver, get_current_target=GPUTarget("cuda", 90, 32), get_active_torch_device=gpu, is_active=True)
    answer(triton_driver, get_current_device=0, get_current_stream=0, get_device_interface=torch.cuda)
    driver.set_active(triton_driver)


def answer(owner: Any, **answers: Any) -> None:
    """Let functions of a module or class return these values, whatever their arguments."""
    for name, value in answers.items():

        def function(*_: Any, value: Any = value, **__: Any) -> Any:
            return value

        setattr(owner, name, staticmethod(function) if isinstance(owner, type) else function)


def compute_on_h200(config: Any) -> None:
    """Build the training of `config` as an H200 would, whole micro-batches compiled, and compute one of them.

    Its tensors have shapes, but no values, so nothing can run: the caller replaces what the compiler generates.
    """
    import torch
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
    model = build_model(config.MODEL, config.DATA.IMAGE_SIZE, config.DATA.IMAGE_CHANNELS)
    inputs = Inputs(config.DATA)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        for module in (*model.modules(), *inputs.modules()):
            for name, weight in module.named_parameters(recurse=False):
                module._parameters[name] = torch.nn.Parameter(mode.from_tensor(weight.detach()).to(device))
            for name, buffer in module.named_buffers(recurse=False):
                module._buffers[name] = mode.from_tensor(buffer).to(device)
        precision = Precision(config.AMP, device)
        built = BuiltModel(config, model, inputs, precision, ALONE, {})
        for speedup in speedups(config, precision):
            # Those without a key, such as activation checkpointing, are decided by the settings alone.
            value = CHOSEN.get(speedup.key, False) if speedup.key else speedup.choose(built).value
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
        state.compute(Batch(images, labels, labels))
