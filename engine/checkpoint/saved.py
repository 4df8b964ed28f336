"""Saved weights at a path: a run, a checkpoint, or a file of weights alone."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor

from engine.checkpoint.fields import MovedModules
from engine.checkpoint.folder import read_state, read_tensors
from utils.cli import CommandLine
from utils.config import Config, load_config
from utils.config.keys import settings
from utils.config.resumed import read_saved
from utils.errors import UserError
from utils.files import kind_of_path
from utils.record.better_weights import Choice, choose_weights
from utils.record.checkpoints import META, STATE, Checkpoint, checkpoint_of, inspect, verify
from utils.record.meta import check_fields
from utils.record.weight_sets import BETTER, SETS, WeightSet, set_named
from utils.record.weights_file import read_weights_meta


@dataclass(frozen=True)
class Saved:
    """Weights at a path, checked but not loaded."""

    path: Path
    meta: dict[str, Any]
    checkpoint: Checkpoint | None = None
    """None: a file of weights alone."""
    only: WeightSet | None = None
    """Weights that such a file has."""

    def has(self, which: WeightSet) -> bool:
        return self.checkpoint.has(which.file) if self.checkpoint else which == self.only

    def require(self, which: WeightSet) -> None:
        if not self.has(which):
            instead = next(other.name for other in SETS if self.has(other))
            raise UserError(
                f"-weights {which.name}: {self.path} has no {which.described} weights; use -weights {instead}."
            )

    def where(self, which: WeightSet) -> Path:
        return self.path / which.file if self.checkpoint else self.path

    def tensors(self, which: WeightSet) -> dict[str, Tensor]:
        """Load the weights, after a check of their hashes."""
        if self.checkpoint is None:
            with safe_open(str(self.path), framework="pt") as file:
                return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
        return read_tensors(verify(self.checkpoint, which.file), which.file)

    def settings(self) -> dict[str, Any]:
        """The run's settings by dotted key."""
        return read_saved(self.meta["settings"], self.path)

    def fp32_modules(self) -> list[str]:
        """Modules that AMP.AUTO_FP32 had moved to fp32."""
        if self.checkpoint is None:
            return self.meta["fp32_modules"]
        state = read_state(self.checkpoint, mapped=True)  # nearly all of it is the optimiser's, and not read
        check_fields(MovedModules, state, self.path / STATE)
        return state["fp32_modules"]


def find_saved(path: Path, weights: str) -> tuple[Saved, Choice]:
    """What is saved at `path`, and the choice of its weights. `weights`: a value of -weights."""
    if not path.exists():
        raise UserError(f"{path}: no such file or folder. Name a run, a checkpoint, or a file of weights.")
    if not path.is_file() and not path.is_dir():
        raise UserError(f"{path}: this is {kind_of_path(path)}. Name a run, a checkpoint, or a file of weights.")
    why = ""
    if path.is_file() and not (path.parent / META).exists():
        meta, only = read_weights_meta(path)
        saved = Saved(path, meta, only=only)
    else:
        folder, why = checkpoint_of(path)
        checkpoint = inspect(folder)
        saved = Saved(checkpoint.folder, checkpoint.meta, checkpoint)
    named = next((which.name for which in SETS if path.name == which.file), BETTER)
    asked = weights if weights != BETTER else named
    if asked != BETTER:
        saved.require(set_named(asked))
    reason = f"-weights {weights}" if weights != BETTER else ""
    choice = choose_weights(saved.meta, [which for which in SETS if saved.has(which)], asked, reason)
    return saved, replace(choice, words=f"{saved.path.name}{f' ({why})' if why else ''}, {choice.words}")


def config_of(
    saved: Saved, flags: dict[str, tuple[Any, str]] | None = None, given: CommandLine | None = None
) -> Config:
    """The run's settings, overridden by `flags` and `given`."""
    own = saved.settings()
    if unknown := sorted(set(own) - settings().keys()):
        names = ", ".join(unknown)
        raise UserError(f"{saved.path}: unknown settings {names}; use the version of vitamp that trained it.")
    base = {key: (value, f"{saved.path}") for key, value in own.items()}
    unset = dict.fromkeys(("MODEL.RESUME", "MODEL.PRETRAINED"), (None, ""))
    return load_config(None, {**base, **unset, **(flags or {})}, given.words if given else {}).config
