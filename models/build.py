"""Builds the model that the MODEL section describes, through timm."""

from __future__ import annotations

import fnmatch
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import timm
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from models.freeze import freeze
from models.names import RECIPES, Base, family_problem, resolve
from models.rates import rate_arguments
from models.shortcuts import NONE, Shortcuts
from models.sizes import DERIVED, arguments_of, as_text, given_sizes, heads_problems, patch_problems, same, sizes_of
from utils.config.model import ModelConfig
from utils.errors import UserError

log = logging.getLogger("vitamp")

LABEL = "vitamp_name"  # where a built model keeps the name it goes by
DRAWING = {"normal_", "uniform_", "erfinv_", "mul_", "add_", "clamp_", "fill_", "zero_"}
"""Of these initial weights are made"""
_plans: dict[tuple[str, int, int, Shortcuts], Plan] = {}


@dataclass(frozen=True)
class Plan:
    """A build that is known to work: timm's name and arguments, and how the model differs from timm's own."""

    timm_name: str
    arguments: dict[str, Any]
    notes: list[str]


def build_model(model: ModelConfig, image_size: int, channels: int, shortcuts: Shortcuts = NONE) -> nn.Module:
    """A model with fresh weights, drawn from torch's random numbers as they stand, exactly as timm draws them."""
    plan = _plan(model, image_size, channels, shortcuts)
    for note in plan.notes:
        log.info(note)
    module = timm.create_model(plan.timm_name, **plan.arguments)
    vars(module)[LABEL] = model.NAME.strip()
    shortcuts.finish(module)
    freeze(module, model.FREEZE)
    log.info("Model %s: timm's %s", model.NAME, type(module).__name__)
    return module


def build_without_weights(model: ModelConfig, image_size: int, channels: int, shortcuts: Shortcuts = NONE) -> nn.Module:
    """The same model on torch's meta device: sizes and operations, no values."""
    plan = _plan(model, image_size, channels, shortcuts)
    module = _without_weights(plan.timm_name, plan.arguments)
    shortcuts.finish(module)
    freeze(module, model.FREEZE)
    return module


def check_model(model: ModelConfig, image_size: int, channels: int, shortcuts: Shortcuts = NONE) -> None:
    """Raise what `build_model` would raise, without making any weights."""
    _plan(model, image_size, channels, shortcuts)
    if model.FREEZE:
        build_without_weights(model, image_size, channels, shortcuts)


def timm_call(model: ModelConfig, image_size: int, channels: int) -> tuple[str, dict[str, Any]]:
    """timm's name and arguments for the same weights, for who uses them without us: no rates, which only train."""
    plan = _plan(model, image_size, channels, NONE)
    return plan.timm_name, {name: value for name, value in plan.arguments.items() if not name.endswith("_rate")}


def count_parameters(module: nn.Module) -> tuple[int, int]:
    """All parameters, and those that are trained."""
    return (
        sum(p.numel() for p in module.parameters()),
        sum(p.numel() for p in module.parameters() if p.requires_grad),
    )


def describe(module: nn.Module) -> str:
    """One line: the model's name, kind, sizes and parameters."""
    words = {
        "PATCH_SIZE": "patch {}",
        "WINDOW_SIZE": "window {}",
        "EMBED_DIM": "width {}",
        "DEPTH": "depth {}",
        "STAGE_DEPTHS": "depths {}",
        "NUM_HEADS": "heads {}",
    }
    sizes = sizes_of(module)
    kind = type(module).__name__.removeprefix("FSDP")  # so does torch rename what it deals out over ranks
    parts = [kind, *(text.format(as_text(sizes[key])) for key, text in words.items() if key in sizes)]
    total, trained = count_parameters(module)
    share = "all trainable" if trained == total else f"{trained:,} trainable, {100 * trained / total:.1f} %"
    return f"{vars(module).get(LABEL, kind)} ({', '.join(parts)}), {total:,} parameters ({share})"


def list_models(pattern: str | None) -> list[str]:
    """The names MODEL.NAME takes, by glob."""
    names = {*timm.list_models(), *RECIPES}
    return sorted(fnmatch.filter(names, pattern or "*"))


def _plan(model: ModelConfig, image_size: int, channels: int, shortcuts: Shortcuts) -> Plan:
    """Made once: the check before the run asks for it, and then the run."""
    wanted = repr(model), image_size, channels, shortcuts
    if wanted not in _plans:
        _plans[wanted] = _make_plan(model, image_size, channels, shortcuts)
    return _plans[wanted]


def _make_plan(model: ModelConfig, image_size: int, channels: int, shortcuts: Shortcuts) -> Plan:
    """Everything about a build that can be found out without weights; all mistakes are reported together."""
    wanted = given_sizes(model)
    base = resolve(model, sizes_given=bool(wanted))
    reference = _without_weights(base.timm_name, {})
    if contradiction := family_problem(model, reference):
        raise UserError(contradiction)

    has, takes = sizes_of(reference), arguments_of(reference)
    edited = {key: value for key, value in wanted.items() if key in takes and not same(key, value, has)}
    rates, problems = rate_arguments(model, reference)
    arguments: dict[str, Any] = {"num_classes": model.NUM_CLASSES, "in_chans": channels}
    if takes or _config_of(reference).get("fixed_input_size"):
        arguments["img_size"] = image_size
    arguments |= {takes[key]: value for key, value in edited.items()} | rates
    cannot = shortcuts.problems(reference, edited.get("PATCH_SIZE"))
    arguments |= {} if cannot else shortcuts.arguments()

    geometry = heads_problems({**has, **edited}) if takes else []
    if "img_size" in arguments:
        geometry += patch_problems(reference, edited.get("PATCH_SIZE"), image_size)
    fixed = {key: value for key, value in wanted.items() if key not in takes}
    if geometry:  # what follows from sizes that do not go together cannot be judged
        fixed = {key: value for key, value in fixed.items() if key not in DERIVED}
        built = has
    else:
        built, geometry = _trial(base.timm_name, arguments, has, image_size)
    problems += [_refused(key, value, reference, built) for key, value in fixed.items() if not same(key, value, built)]
    problems += geometry + cannot
    if problems:
        raise UserError("The model cannot be built:\n" + "\n".join(f"  {line}" for line in problems))
    return Plan(base.timm_name, arguments, _notes(model, base, edited, has, rates))


def _without_weights(timm_name: str, arguments: dict[str, Any]) -> nn.Module:
    # The fork keeps the caller's random numbers where they stand, whatever a constructor draws.
    with torch.random.fork_rng(devices=[]), torch.device("meta"), _NothingDrawn():
        return timm.create_model(timm_name, **arguments)


class _NothingDrawn(TorchFunctionMode):
    """Leaves out the initial values of weights that hold none: they cost most of the time, and the import of sympy."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        options = kwargs or {}
        if getattr(func, "__name__", "") in DRAWING:
            tensor = args[0] if args else options["tensor"]  # the latter by torch.nn.init
            if tensor.is_meta:
                return tensor
        return func(*args, **options)


def _trial(
    timm_name: str, arguments: dict[str, Any], has: dict[str, Any], image_size: int
) -> tuple[dict[str, Any], list[str]]:
    """Build and run once without weights: the sizes that came out (else `has`), and what timm refuses."""
    try:
        module = _without_weights(timm_name, arguments).eval()
    except (AssertionError, ArithmeticError, TypeError, ValueError, RuntimeError) as error:
        given = ", ".join(f"{name}={value}" for name, value in arguments.items())
        return has, [f"timm does not build {timm_name} with {given}: {error or type(error).__name__}"]
    if not arguments_of(module):  # of ViT and Swin it is known which images they take
        try:
            with torch.no_grad():
                module(torch.empty(1, arguments["in_chans"], image_size, image_size, device="meta"))
        except NotImplementedError:
            pass  # a model that looks at values cannot be tried without any
        except (AssertionError, ArithmeticError, TypeError, ValueError, RuntimeError) as error:
            return has, [f"DATA.IMAGE_SIZE {image_size}: {timm_name} cannot take such images ({error})"]
    return sizes_of(module), []


def _refused(key: str, value: Any, module: nn.Module, has: dict[str, Any]) -> str:
    kind = type(module).__name__
    if key not in has:
        return f"MODEL.{key} {as_text(value)}: {kind} has no such size; leave the key out"
    why = f"this {kind} has {as_text(has[key])}"
    if key == "ATTN_HEAD_SIZE":
        why += " (EMBED_DIM / NUM_HEADS)"
    return f"MODEL.{key} {as_text(value)}: {why} and cannot be built otherwise; leave the key out or give that value"


def _notes(
    model: ModelConfig, base: Base, edited: dict[str, Any], has: dict[str, Any], rates: dict[str, float]
) -> list[str]:
    differing = ", ".join(f"{key} {as_text(value)} (timm's: {as_text(has.get(key))})" for key, value in edited.items())
    notes = []
    if base.is_label:
        tail = f", but for {differing}" if differing else ""
        notes.append(f"MODEL.NAME {model.NAME} is a label; the sizes are those of timm's {base.timm_name}{tail}")
    elif differing:
        notes.append(
            f"MODEL.NAME {model.NAME} is only a label here, this is no longer timm's model of that name: {differing}"
        )
    if model.DROPOUT and "proj_drop_rate" in rates and "pos_drop_rate" not in rates:
        notes.append("MODEL.DROPOUT acts inside the blocks; timm's model has none after the patch embedding")
    return notes


def _config_of(module: nn.Module) -> dict[str, Any]:
    return vars(module).get("pretrained_cfg") or {}
