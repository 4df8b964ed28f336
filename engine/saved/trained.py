"""A trained model, ready to be asked: from a run, from one checkpoint wherever it lies, or from weights alone.

One at a time: how attention and fp32 products are computed are switches of the process.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from engine.amp.fp32_modules import force_fp32
from engine.amp.op_lists import OpLists
from engine.amp.precision import Precision, check_amp, check_precision
from engine.checkpoint.chosen import checkpoint_of
from engine.checkpoint.fields import Moved, check_fields
from engine.checkpoint.folder import EMA, META, MODEL, STATE, Checkpoint, inspect, verify
from engine.checkpoint.shard_files import files_of
from engine.checkpoint.state import load_weights
from engine.checkpoint.weights_file import read_told
from engine.machine.device import pick_device, prepare
from engine.machine.memory import is_out_of_memory
from engine.setup import model_in_precision
from utils.better_weights import BOTH, Choice, Wanted, Which, choose_weights
from utils.cli import CommandLine, amp_settings
from utils.config import Config, load_config
from utils.config.keys import settings, values_to_keep
from utils.distributed.world import ALONE
from utils.errors import TrainingError, UserError
from utils.log import log
from utils.regular_file import kind_of_path
from utils.run_folder import run_of

FILES: dict[Which, str] = {"model": MODEL, "ema": EMA}


@dataclass
class Trained:
    """A model in evaluation mode on its device, and what belongs to it."""

    model: nn.Module
    inputs: nn.Module
    """uint8 images to what the model sees"""
    precision: Precision
    config: Config
    classes: list[str] | None
    """Names in the order of the labels, where the training data had names."""
    source: Path
    """The checkpoint's folder, or the file of weights."""
    weights: Which
    saved: Saved
    choice: str
    """For the log: which checkpoint, which of its weights, and how well each validated."""

    @torch.no_grad()  # not inference mode: fp8 layers do not run in it
    def logits(self, images: Tensor) -> Tensor:
        """What the model says of uint8 images (B x C x S x S), in fp32, computed as validation computes it."""
        amp, device = self.config.AMP, self.precision.device
        with (
            OpLists(device.type, amp.CUSTOM_WHITE_LIST, amp.CUSTOM_BLACK_LIST),
            self.precision.autocast(training=False),
        ):
            try:
                return self.model(self.inputs(images.to(device))).float()
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                raise TrainingError(
                    f"out of memory with {len(images)} images at once on {device.type}: take less by -batch_size (in "
                    "predict.py and evaluate.py), or -amp."
                ) from None

    def name_of(self, label: int) -> str:
        """A class's name; its number where there are no names, or more outputs than names."""
        names = self.classes or []
        return names[label] if label < len(names) else str(label)

    def names(self) -> list[str]:
        """Of all the model's classes."""
        return [self.name_of(label) for label in range(self.config.MODEL.NUM_CLASSES)]

    def has(self, which: Which) -> bool:
        return self.saved.has(which)

    def take(self, which: Which) -> None:
        """Exchange the weights for those of the model, or of its moving average."""
        self.saved.require(which)
        load_weights(self.model, self.saved.tensors(which), f"{self.saved.where(which)}")
        self.weights = which

    def words(self) -> str:
        """Which weights of which model these are."""
        which = "the moving average" if self.weights == "ema" else "the model's weights"
        return f"{self.config.MODEL.NAME}, {which} of {self.source}, in {self.precision.name}"


def load_trained(
    path: Path | str,
    weights: Wanted = "auto",
    device: str | None = None,
    amp: str | None = None,
    given: CommandLine | None = None,
) -> Trained:
    """The model that `path` means: a run's best checkpoint (else its last), a checkpoint, a file in one, or weights
    that scripts/checkpoint.py or scripts/export.py wrote.

    `weights` auto: those that validated better, the plain ones or their EMA. `device` None: the run's, if it is here.
    `amp` None: as the run validates; else a word of -amp's, or `on`. `given`: settings that replace the run's.
    """
    saved, choice = find_saved(Path(path).expanduser(), weights)
    config = config_of(saved, _flags(device, amp, given), given)
    check_amp(config.AMP, config.TRAIN)
    asked = {**given.flags, **given.words}.keys() if given else ()
    place = _device(device or (config.DEVICE if "DEVICE" in asked else None), config)
    check_precision(config.AMP, place)
    prepare(config, place, ALONE)
    with _quietly():
        model, inputs, precision = model_in_precision(config, place, saved.meta.get("choices", {}))
    if precision.level in ("O1", "O2") and (moved := saved.fp32_modules()):
        force_fp32(model, moved, place.type)
    model.eval()
    classes = saved.meta.get("classes")
    trained = Trained(model, inputs, precision, config, classes, saved.path, choice.which, saved, choice.words)
    trained.take(choice.which)
    return trained


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """How a model is built was told when it was trained; that it has fresh weights would only be misunderstood now."""
    before = log.level
    log.setLevel(max(before, logging.WARNING))
    try:
        yield
    finally:
        log.setLevel(before)


@dataclass(frozen=True)
class Saved:
    """What lies at a path, looked at and not loaded."""

    path: Path
    meta: dict[str, Any]
    checkpoint: Checkpoint | None = None
    """None: a file of weights alone."""
    only: Which | None = None
    """Which weights such a file holds."""

    def has(self, which: Which) -> bool:
        return self.checkpoint.has(FILES[which]) if self.checkpoint else which == self.only

    def require(self, which: Which) -> None:
        if not self.has(which):
            lacks, instead = ("moving average (TRAIN.MODEL_EMA)", "model") if which == "ema" else ("plain", "ema")
            raise UserError(f"-weights {which}: {self.path} holds no {lacks} weights; take -weights {instead}.")

    def where(self, which: Which) -> Path:
        return self.path / FILES[which] if self.checkpoint else self.path

    def tensors(self, which: Which) -> dict[str, Tensor]:
        """Hashed before they are used."""
        if self.checkpoint is None:
            with safe_open(str(self.path), framework="pt") as file:
                return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no mapping
        files = self.checkpoint.meta["files"]
        wanted = {name: files[name] for name in files_of(FILES[which], files)}
        verify(replace(self.checkpoint, meta={**self.checkpoint.meta, "files": wanted}))
        return self.checkpoint.tensors(FILES[which])

    def settings(self) -> dict[str, Any] | None:
        """Those of the run, by dotted key; of an older checkpoint from where its run keeps them."""
        run = run_of(self.path) if self.checkpoint and "settings" not in self.meta else None
        if run is None or not (run / "config.yaml").exists():
            return self.meta.get("settings")
        return values_to_keep(load_config(str(run / "config.yaml")).config)

    def fp32_modules(self) -> list[str]:
        """What AMP.AUTO_FP32 had moved to fp32 by then."""
        if self.checkpoint is None:
            return self.meta.get("fp32_modules", [])
        state = self.checkpoint.state(mapped=True)  # since nearly all of it is the optimiser's
        check_fields(Moved, state, self.path / STATE)
        return state["fp32_modules"]


def find_saved(path: Path, weights: Wanted) -> tuple[Saved, Choice]:
    """What lies there, and which of its weights are meant."""
    if not path.exists():
        raise UserError(f"{path}: there is no such file or folder; name a run, a checkpoint, or its weights.")
    if not path.is_file() and not path.is_dir():
        raise UserError(f"{path}: it is {kind_of_path(path)}; name a run, a checkpoint, or its weights.")
    why = ""
    if path.is_file() and not (path.parent / META).exists():
        meta, only = read_told(path)
        saved = Saved(path, meta, only=only)
    else:
        folder, why = checkpoint_of(path)
        checkpoint = inspect(folder)
        saved = Saved(checkpoint.folder, checkpoint.meta, checkpoint)
    named: Which | None = next((which for which, file in FILES.items() if path.name == file), None)
    asked = weights if weights != "auto" else named or "auto"
    if asked != "auto":
        saved.require(asked)
    reason = f"-weights {weights}" if weights != "auto" else ""
    choice = choose_weights(saved.meta, [which for which in BOTH if saved.has(which)], asked, reason)
    return saved, replace(choice, words=f"{saved.path.name}{f' ({why})' if why else ''}, {choice.words}")


def _flags(device: str | None, amp: str | None, given: CommandLine | None) -> dict[str, tuple[Any, str]]:
    flags = dict(given.flags) if given else {}
    if device is not None:
        flags["DEVICE"] = (device, "-device")
    if amp is not None:
        flags |= {key: (value, "-amp") for key, value in amp_settings(amp).items()}
    if flags.get("AMP.ENABLED", (False,))[0]:  # asked for here, it holds here
        flags.setdefault("AMP.EVAL", (True, "-amp"))
    return flags


def config_of(
    saved: Saved, flags: dict[str, tuple[Any, str]] | None = None, given: CommandLine | None = None
) -> Config:
    """The run's settings, with what is given here in their place."""
    kept = saved.settings()
    if kept is None:
        raise UserError(
            f"{saved.path / META}: has no settings, as checkpoints of older versions have not, and no config.yaml of "
            "its run lies two folders above: put the checkpoint back into RUN/checkpoints, beside RUN/config.yaml."
        )
    if unknown := sorted(set(kept) - settings().keys()):
        names = ", ".join(unknown)
        raise UserError(f"{saved.path}: has settings unknown here, {names}; use the version of vitamp that trained it.")
    base = {key: (value, f"{saved.path}") for key, value in kept.items()}
    fresh = dict.fromkeys(("MODEL.RESUME", "MODEL.PRETRAINED"), (None, ""))
    return load_config(None, {**base, **fresh, **(flags or {})}, given.words if given else {}).config


def _device(asked: str | None, config: Config) -> torch.device:
    """The one asked for; else the run's own, if this machine has such a one; else the best there is."""
    if asked is None and config.DEVICE is not None:
        try:
            return pick_device(config.DEVICE, ALONE)
        except UserError:
            pass
    return pick_device(asked, ALONE)
