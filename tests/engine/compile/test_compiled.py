"""Compiled updates are those that are written: same weights, same names, same random numbers.

But for the slow ones, these tests compile as far as the graphs of forward and backward; machine code takes minutes.
"""

import logging
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.amp.precision import Precision
from engine.compile import compiled as compiling
from engine.compile.compiled import BLOCKS, CACHE, WHOLE, Compiling
from engine.evaluation.evaluate import validate
from engine.optim.ema import Ema
from engine.setup import ReadyToTrain
from tests.engine.amp.modes import MODES
from tests.engine.small import build, train, windows
from utils.config.data import DataConfig
from utils.config.schema import AmpConfig
from utils.distributed.world import ALONE
from utils.errors import UserError

RANDOM = {"MODEL__DEPTH": 2, "MODEL__DROPOUT": 0.1, "MODEL__DROPPATH": 0.2, "DATA__BATCH_SIZE": 16}
PRECISIONS = {
    "fp32": {},
    "O1": {**MODES["O1 bf16"], "AMP__FP32_MODULES": "[blocks.1.attn]"},
    **{mode: MODES[mode] for mode in ("O1 fp16", "O2 bf16", "NAIVE bf16", "O3 bf16")},
}


@pytest.fixture(autouse=True)
def compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Quick, and as it was before once the test is over."""
    import torch._dynamo.config as tracing
    import torch._functorch.config as autograd
    import torch._inductor.config as inductor
    from torch._dynamo.utils import counters

    monkeypatch.setattr(compiling, "BACKEND", "aot_eager")
    monkeypatch.setattr(logging.getLogger("torch.__trace"), "disabled", True)  # pytest would keep all of it
    monkeypatch.setenv(CACHE, str(tmp_path / "compiled"))
    torch.compiler.reset()
    counters.clear()
    with ExitStack() as former:
        for settings, names in (
            (tracing, ("recompile_limit", "optimize_ddp")),
            (autograd, ("force_non_lazy_backward_lowering", "backward_pass_autocast")),
            (inductor, ("fallback_random", "joint_custom_post_pass")),
            (torch.compiler.config, ("cache_key_tag",)),
        ):
            former.enter_context(settings.patch({name: getattr(settings, name) for name in names}))
        yield
    torch.compiler.reset()


def compiled(ready: ReadyToTrain, how: str, sharded: bool = False, auto: bool = False) -> ReadyToTrain:
    parts = ready.parts
    compiling = Compiling(DataConfig(BATCH_SIZE=16), parts.precision, ALONE, sharded)
    compiling.how, compiling.auto = how, auto
    before = [one for one in parts.callbacks if not isinstance(one, Ema)]
    parts.callbacks = (*before, compiling, *parts.callbacks[len(before) :])
    parts.assemble()
    return ready


def weights(ready: ReadyToTrain) -> torch.Tensor:
    return torch.cat([value.detach().flatten().float() for value in ready.parts.model.state_dict().values()])


def graphs() -> int:
    from torch._dynamo.utils import counters

    return counters["stats"]["unique_graphs"]


QUICK = ((BLOCKS, "O2 bf16"),)
CASES = [(how, precision) for precision in PRECISIONS for how in (BLOCKS, WHOLE)]


@pytest.mark.parametrize(
    ("how", "precision"), [pytest.param(*case, marks=[pytest.mark.slow] * (case not in QUICK)) for case in CASES]
)
def test_compiled_updates_equal_eager_ones(tiny: Path, how: str, precision: str) -> None:
    words = {**RANDOM, **PRECISIONS[precision], "TRAIN__ACCUM_ITER": 2, "TRAIN__MODEL_EMA": "true"}
    written, ours = build(tiny, **words), compiled(build(tiny, **words), how)
    before = weights(ours)
    for ready in (written, ours):
        train(ready, 2)
    assert graphs() == (2 if how == BLOCKS else 1), "blocks of other drop paths are two graphs"
    stepped = (weights(written) - before).norm()
    assert stepped > 0
    # Compiled code casts to 16 bits in other places, and Adam's first steps are large for the smallest gradients too.
    assert (weights(ours) - weights(written)).norm() <= (1e-6 if precision == "fp32" else 0.1) * stepped
    ema = ours.parts.callback(Ema)
    assert ema is not None
    assert [*ours.parts.model.state_dict()] == [*ema.module.state_dict()] == [*written.parts.model.state_dict()]


def test_end_of_token_dropping_is_logged_as_compiling_and_not_counted_as_training(
    tiny: Path, said: pytest.LogCaptureFixture
) -> None:
    ready = compiled(build(tiny, DATA__BATCH_SIZE=16, TRAIN__TOKEN_DROP=0.5, TRAIN__TOKEN_DROP_TAIL=1), WHOLE)
    parts, compiled_at = ready.parts, []
    parts.after_pause = lambda: compiled_at.append(graphs())
    for epoch in (1, 1, 2, 2):
        parts.enter(epoch)
        train(ready, 1)
    assert compiled_at == [1, 2], "not at the second update of an epoch"
    lines = [line for line in said.messages if line.startswith("Compiling")]
    assert [", 50 % of the patches left out" in line for line in lines] == [True, False]


@pytest.mark.parametrize(("how", "sharded"), [(WHOLE, False), (BLOCKS, False), (BLOCKS, True)])
def test_code_that_cannot_be_compiled_is_an_error_only_if_asked_for(
    tiny: Path, said: pytest.LogCaptureFixture, how: str, sharded: bool
) -> None:
    """A block of one's own that reads a value, as a default run on a GPU meets it."""
    written, asked, auto = (build(tiny, DATA__BATCH_SIZE=16) for _ in range(3))
    for ready in (written, asked, auto):
        own: Any = ready.model.get_submodule("blocks.0.mlp")
        own.register_forward_hook(lambda _module, _seen, found: found if found.sum() < 1e9 else 2 * found)
    remedy = "TRAIN.COMPILE=none, or blocks" if how == WHOLE else r"TRAIN.COMPILE=none\."
    with pytest.raises(UserError, match=f"torch cannot compile this model .* {remedy}"):
        train(compiled(asked, how, sharded), 1)
    for ready in (written, compiled(auto, how, sharded, auto=True)):
        train(ready, 2)
    assert torch.equal(weights(written), weights(auto))
    assert len([line for line in said.messages if "so it is not compiled" in line]) == 1


@pytest.mark.slow
@pytest.mark.parametrize("how", [BLOCKS, WHOLE])
def test_smaller_micro_batches_and_validation_are_not_compiled(tiny: Path, how: str) -> None:
    ready = compiled(build(tiny, MODEL__DEPTH=2, DATA__BATCH_SIZE=16, DATA__DROP_LAST="false"), how)
    source = windows(ready)
    train(ready, 1, source)
    before = graphs()
    validate(ready, ready.model, ALONE)
    sizes = []
    for window in source:
        _, batch = next(iter(window))
        sizes.append(len(batch.images))
        loss, _, _ = ready.parts.compute(batch)
        loss.backward()
        if sizes[-1] < 16:
            break
    assert sizes[-1] == 1437 % 16
    assert set(sizes[:-1]) == {16}
    assert graphs() == before


def test_graph_cache_key_includes_the_precision() -> None:
    config: Any = torch.compiler.config
    tags = set()
    for level, dtype in [("O0", "bf16"), ("O1", "bf16"), ("O1", "fp16"), ("O1", "bf16"), ("O2", "fp16")]:
        amp = AmpConfig.model_validate({"ENABLED": True, "LEVEL": level, "DTYPE": dtype})
        compiling._configure_compiler(DataConfig(), Precision(amp, torch.device("cpu")), ALONE, rewrites=True)
        tags.add(config.cache_key_tag)
    assert len(tags) == 4
