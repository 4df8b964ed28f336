"""Building the model of the MODEL section with timm."""

from __future__ import annotations

import fnmatch
import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import timm
import torch
from timm.models.vision_transformer import VisionTransformer
from torch import nn
from torch.overrides import TorchFunctionMode

from models.freeze import freeze, pretrained_cfg
from models.sizes import (
    NONE,
    Shortcuts,
    arguments_of,
    as_text,
    given_sizes,
    heads_problems,
    patch_problems,
    same,
    sizes_of,
)
from utils.config.model import ModelConfig
from utils.errors import UserError, either, nearest
from utils.log import log
from utils.terminal import DETAIL
from vitamp.registry import own_named

# Model of each TYPE for a NAME that is no timm model. PaddleViT's default for NAME is the TYPE itself.
DEFAULTS = {
    "vit": "vit_base_patch16_224",
    "deit": "deit_base_patch16_224",
    "swin": "swin_tiny_patch4_window7_224",
    "mae": "vit_base_patch16_224",
}

# Models of PaddleViT's recipes that timm has under another name.
RECIPES = {
    "swin_base_patch4_window7_224_21k_1k": "swin_base_patch4_window7_224.ms_in22k_ft_in1k",
    "swin_base_patch4_window12_384_21k_1k": "swin_base_patch4_window12_384.ms_in22k_ft_in1k",
}
MOST_SUGGESTED = 3
"""Models suggested for a name that several begin with."""
LAYER_SCALE = ("init_values", "ls_init_value", "eta")
"""Names of the initial value of layer scale in timm's models"""
LABEL = "vitamp_name"
"""Attribute of a built model with its MODEL.NAME"""
BYTES = 4
"""Bytes of a weight when it is initialised."""
INITIALISERS = {"normal_", "uniform_", "erfinv_", "mul_", "add_", "clamp_", "fill_", "zero_"}
"""Operations that initialise weights"""
MOST_BLOCKS = 10_000
NO_SUCH_SIZE = "has no such size"
_plans: dict[tuple[str, int, int, Shortcuts], Plan] = {}


@dataclass(frozen=True)
class Plan:
    """A build that was tried without weights: timm's name and arguments, and notes on differences from timm's model."""

    timm_name: str
    arguments: dict[str, Any]
    notes: list[str]
    weights: int


def build_model(model: ModelConfig, image_size: int, channels: int, shortcuts: Shortcuts = NONE) -> nn.Module:
    """A model with weights initialised by timm, from torch's random generator in its current state.

    Without the adapters of MODEL.LORA, which are added once the frozen weights are loaded.
    """
    plan = _plan(model, image_size, channels, shortcuts)
    for note in plan.notes:
        log.info(note, extra=DETAIL)
    module = timm.create_model(plan.timm_name, **plan.arguments)
    vars(module)[LABEL] = model.NAME.strip()
    whose = "timm's" if type(module).__module__.startswith("timm.") else "your own"
    masked = ", as the encoder of a masked autoencoder" * model.MAE_PRETRAIN
    log.info("Model %s: %s %s%s", model.NAME, whose, type(module).__name__, masked, extra=DETAIL)
    return _finished(module, model, shortcuts)


def build_without_weights(model: ModelConfig, image_size: int, channels: int, shortcuts: Shortcuts = NONE) -> nn.Module:
    """The model as it is trained, on torch's meta device, without weights in memory."""
    plan = _plan(model, image_size, channels, shortcuts)
    with torch.device("meta"), _NoInitialisation():
        module = _finished(_without_weights(plan.timm_name, plan.arguments), model, shortcuts)
        if model.LORA.RANK is not None:
            from models.lora import add_adapters

            add_adapters(module, model.LORA, seed=0)
        return module


def _finished(module: nn.Module, model: ModelConfig, shortcuts: Shortcuts) -> nn.Module:
    """What timm's model becomes: a masked autoencoder, or one with frozen parts."""
    shortcuts.finish(module)
    if model.MAE_PRETRAIN:
        from models.masked import masked_autoencoder

        module = masked_autoencoder(module, model)
    freeze(module, model.FREEZE, for_now=model.UNFREEZE_EPOCH is not None)
    return module


def check_model(
    model: ModelConfig, image_size: int, channels: int, shortcuts: Shortcuts = NONE, memory: int | None = None
) -> None:
    """Raise what `build_model` would raise, without allocating weights. `memory`: the machine's, in bytes."""
    plan = _plan(model, image_size, channels, shortcuts)
    if memory is not None and plan.weights * BYTES > memory:
        raise UserError(
            f"The model has {plan.weights:,} weights, which take {plan.weights * BYTES / 2**30:,.0f} GiB in fp32; this "
            f"machine has {memory / 2**30:,.0f} GiB. Use a smaller MODEL.EMBED_DIM, DEPTH,"
            " NUM_CLASSES or DATA.IMAGE_SIZE."
        )
    if model.FREEZE or model.LORA.RANK is not None:
        module = build_without_weights(model, image_size, channels, shortcuts)
        if model.LORA.RANK is not None:
            from models.lora import require_calls

            require_calls(module, model.LORA, channels, image_size)


def timm_call(model: ModelConfig, image_size: int, channels: int) -> tuple[str, dict[str, Any]]:
    """Arguments of timm.create_model for using the weights without vitamp; without rates, which matter in training."""
    plan = _plan(model, image_size, channels, NONE)
    arguments = {name: value for name, value in plan.arguments.items() if not name.endswith("_rate")}
    if own := own_named("model", plan.timm_name):
        arguments |= own.values
    return plan.timm_name, arguments


def count_parameters(module: nn.Module) -> tuple[int, int]:
    """Numbers of all and of trainable parameters."""
    return (
        sum(p.numel() for p in module.parameters()),
        sum(p.numel() for p in module.parameters() if p.requires_grad),
    )


def describe(module: nn.Module) -> str:
    """One line with the model's name, class, sizes and parameters."""
    formats = {
        "PATCH_SIZE": "patch {}",
        "WINDOW_SIZE": "window {}",
        "EMBED_DIM": "width {}",
        "DEPTH": "depth {}",
        "STAGE_DEPTHS": "depths {}",
        "NUM_HEADS": "heads {}",
    }
    sizes = sizes_of(module)
    kind = type(module).__name__.removeprefix("FSDP")  # torch's fully_shard renames the class
    parts = [kind, *(text.format(as_text(sizes[key])) for key, text in formats.items() if key in sizes)]
    if (words := getattr(module, "masking_words", None)) is not None:
        parts.append(words())
    total, trainable = count_parameters(module)
    fraction = "all trainable" if trainable == total else f"{trainable:,} trainable, {100 * trainable / total:.1f} %"
    return f"{vars(module).get(LABEL, kind)} ({', '.join(parts)}), {total:,} parameters ({fraction})"


def list_models(pattern: str | None) -> list[str]:
    """Names that MODEL.NAME accepts, filtered by a glob."""
    names = {*timm.list_models(), *RECIPES}
    return sorted(fnmatch.filter(names, pattern or "*"))


def _plan(model: ModelConfig, image_size: int, channels: int, shortcuts: Shortcuts) -> Plan:
    """The plan of a build, cached because the check before the run and the run itself both need it."""
    key = repr(model), image_size, channels, shortcuts
    if key not in _plans:
        _plans[key] = _make_plan(model, image_size, channels, shortcuts)
    return _plans[key]


def _make_plan(model: ModelConfig, image_size: int, channels: int, shortcuts: Shortcuts) -> Plan:
    """Check everything about a build that can be checked without weights; all problems are reported together."""
    wanted = given_sizes(model)
    base = resolve(model, sizes_given=bool(wanted))
    reference = _without_weights(base.timm_name, {})
    if problem := family_problem(model, reference):
        raise UserError(problem)

    has, takes = sizes_of(reference), arguments_of(reference)
    edited = {key: value for key, value in wanted.items() if key in takes and not same(key, value, has)}
    rates, problems = rate_arguments(model, reference)
    classes = 0 if model.MAE_PRETRAIN else model.NUM_CLASSES
    arguments: dict[str, Any] = {"num_classes": classes, "in_chans": channels}
    if takes or pretrained_cfg(reference).get("fixed_input_size"):
        arguments["img_size"] = image_size
    arguments |= {takes[key]: value for key, value in edited.items()} | rates
    unsupported = shortcuts.problems(reference, edited.get("PATCH_SIZE"))
    arguments |= {} if unsupported else shortcuts.arguments()

    if model.MAE_PRETRAIN:
        from models.masked import masking_problems

        problems += masking_problems(reference, model)
    geometry = heads_problems({**has, **edited}) if takes else []
    if "img_size" in arguments:
        geometry += patch_problems(reference, edited.get("PATCH_SIZE"), image_size)
    fixed = {key: value for key, value in wanted.items() if key not in takes}
    if geometry:
        built, weights = has, 0
    else:
        built, weights, geometry = _trial(base.timm_name, arguments, has, image_size)
    problems += [_refused(key, value, reference, built) for key, value in fixed.items() if not same(key, value, built)]
    problems += geometry + unsupported
    if problems:
        raise UserError("The model cannot be built:\n" + "\n".join(f"  {line}" for line in problems))
    differing = ", ".join(f"{key} {as_text(value)} (timm's: {as_text(has.get(key))})" for key, value in edited.items())
    notes = []
    if base.is_label:
        sizes = f"the sizes of timm's {base.timm_name}" + (f", except for {differing}" if differing else "")
        notes.append(f"MODEL.NAME {model.NAME} is only a label: the model is built with {sizes}")
    elif differing:
        notes.append(
            f"MODEL.NAME {model.NAME} is only a label here: the model differs from timm's model of that name in "
            f"{differing}"
        )
    if model.DROPOUT and "proj_drop_rate" in rates and "pos_drop_rate" not in rates:
        notes.append(
            "MODEL.DROPOUT applies inside the blocks only: timm's model has no dropout after the patch embedding"
        )
    return Plan(base.timm_name, arguments, notes, weights)


def _without_weights(timm_name: str, arguments: dict[str, Any]) -> nn.Module:
    # The fork protects the caller's random generator from what a constructor draws.
    with torch.random.fork_rng(devices=[]), torch.device("meta"), _NoInitialisation():
        return timm.create_model(timm_name, **arguments)


@dataclass(frozen=True)
class Base:
    """The timm model a build starts from."""

    timm_name: str
    is_label: bool
    """MODEL.NAME is not a timm name, only a label"""


def is_timm_name(name: str) -> bool:
    """Whether timm has a model of this name; a tag after the dot must be one that timm has weights for."""
    architecture, _, tag = name.partition(".")
    if not timm.is_model(architecture):
        return False
    return not tag or name in timm.list_pretrained(f"{architecture}.*")


def resolve(model: ModelConfig, sizes_given: bool) -> Base:
    """The timm model for these settings. With `sizes_given`, NAME may be any label."""
    name = model.NAME.strip()
    if name in RECIPES:
        return Base(RECIPES[name], is_label=False)
    if is_timm_name(name):
        return Base(name, is_label=False)
    if name.casefold() in DEFAULTS:
        return Base(DEFAULTS[name.casefold()], is_label=True)
    if model.TYPE in DEFAULTS and sizes_given:
        return Base(DEFAULTS[model.TYPE], is_label=True)
    if sizes_given and model.TYPE not in DEFAULTS and "." not in name:
        raise UserError(
            f"MODEL.TYPE: '{model.TYPE}' cannot be built from sizes (MODEL.EMBED_DIM, ...); only "
            f"{', '.join(DEFAULTS)} can: set TYPE to one of them.{nearest(model.TYPE, DEFAULTS)} Or set MODEL.NAME "
            f"to a timm model; '{name}' is not one.{similar_models(name)}"
        )
    raise UserError(_unknown(model, name))


def _unknown(model: ModelConfig, name: str) -> str:
    architecture, _, tag = name.partition(".")
    if tag and timm.is_model(architecture):
        tags = timm.list_pretrained(f"{architecture}.*")
        return f"MODEL.NAME: timm has no tag '{tag}' for {architecture}; it has {', '.join(tags) or 'none'}."
    if model.TYPE in DEFAULTS:
        why = (
            f"and no sizes (MODEL.EMBED_DIM, ...) are given to build a model of MODEL.TYPE {model.TYPE} with that name"
        )
    else:
        why = f"and MODEL.TYPE '{model.TYPE}' is not one of {', '.join(DEFAULTS)}"
    return f"MODEL.NAME: '{name}' is not a timm model, {why}.{similar_models(name)} -list_models shows all names."


def similar_models(name: str, more: Sequence[str] = ()) -> str:
    """' Did you mean A, B or C?': the models with most weights whose names begin so, or the most similar name.

    `more`: other names that are possible, such as those of weights.
    """
    beginning = [one for one in timm.list_models() if one.startswith(name.casefold())] if name else []
    beginning.sort(key=lambda one: (-len(timm.list_pretrained(f"{one}.*")), one))
    most = beginning[:MOST_SUGGESTED]
    return f" Did you mean {either(most)}?" if most else nearest(name, [*timm.list_models(), *RECIPES, *more])


def family_problem(model: ModelConfig, reference: Any) -> str | None:
    """Message if TYPE is deit or swin and NAME is of another family. TYPE vit, the default, contradicts no NAME."""
    kind = type(reference).__name__
    contradicts = (model.TYPE == "swin" and "Swin" not in kind) or (
        model.TYPE == "deit" and not isinstance(reference, VisionTransformer)
    )
    if not contradicts:
        return None
    return (
        f"MODEL.TYPE {model.TYPE} and MODEL.NAME {model.NAME} contradict each other: timm's model of that name is a "
        f"{kind}. Set NAME to a {model.TYPE} model such as {DEFAULTS[model.TYPE]}, or leave TYPE out."
    )


def rate_arguments(model: ModelConfig, module: nn.Module) -> tuple[dict[str, float], list[str]]:
    """timm's arguments for the rates and the layer scale, and problems with those that this model does not have."""
    # Arguments of the class's constructor with their defaults, including those passed on to its base classes.
    defaults: dict[str, Any] = {}
    for base in type(module).__mro__:
        if base is nn.Module:
            break
        for name, parameter in inspect.signature(base.__init__).parameters.items():
            defaults.setdefault(name, parameter.default)
    # DROPOUT means dropout inside the blocks; models without it (ResNet) have dropout in the head alone.
    inside = [name for name in ("pos_drop_rate", "proj_drop_rate") if name in defaults]
    wanted = {
        "DROPOUT": (model.DROPOUT, inside or ["drop_rate"]),
        "ATTENTION_DROPOUT": (model.ATTENTION_DROPOUT, ["attn_drop_rate"]),
        "DROPPATH": (model.DROPPATH, ["drop_path_rate"]),
    }
    arguments: dict[str, float] = {}
    problems = []
    for key, (rate, names) in wanted.items():
        known = [name for name in names if name in defaults]
        if rate and not known:
            problems.append(f"MODEL.{key} {rate}: {type(module).__name__} has no such rate; set the key to 0")
        # A rate of 0 is passed only if timm's default is not 0, as for Swin's drop path: 0 in the YAML means 0.
        arguments |= {name: rate for name in known if rate or defaults[name]}
    if model.INIT_VALUES is not None:
        known = [name for name in LAYER_SCALE if name in defaults]
        arguments |= dict.fromkeys(known, model.INIT_VALUES)
        if not known:
            problems.append(
                f"MODEL.INIT_VALUES {model.INIT_VALUES:g}: {type(module).__name__} takes no initial value of layer "
                "scale; leave the key out"
            )
    return arguments, problems


class _NoInitialisation(TorchFunctionMode):
    """Skips the initialisation of weights on the meta device, which would take most of the time and import sympy."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        options = kwargs or {}
        if getattr(func, "__name__", "") in INITIALISERS:
            tensor = args[0] if args else options["tensor"]  # torch.nn.init passes it by name
            if tensor.is_meta:
                return tensor
        return func(*args, **options)


def _trial(
    timm_name: str, arguments: dict[str, Any], has: dict[str, Any], image_size: int
) -> tuple[dict[str, Any], int, list[str]]:
    """Build the model and run it once without weights.

    Returns its sizes (`has` after a failure), the number of its weights, and problems, such as timm's errors.
    """
    depths = arguments.get("depths", arguments.get("depth", 0))
    blocks = sum(depths) if isinstance(depths, tuple) else depths
    if blocks > MOST_BLOCKS:  # building them would take minutes even without weights
        return has, 0, [f"{blocks:,} blocks; at most {MOST_BLOCKS:,} are supported"]
    try:
        module = _without_weights(timm_name, arguments).eval()
    except (AssertionError, ArithmeticError, TypeError, ValueError, RuntimeError) as error:
        given = ", ".join(f"{name}={value}" for name, value in arguments.items())
        return has, 0, [f"timm cannot build {timm_name} with {given}: {error or type(error).__name__}"]
    if not arguments_of(module):  # image sizes of ViT and Swin are checked by arithmetic
        try:
            with torch.no_grad():
                module(torch.empty(1, arguments["in_chans"], image_size, image_size, device="meta"))
        except NotImplementedError:
            pass  # a model whose operations depend on values cannot run without them
        except (AssertionError, ArithmeticError, TypeError, ValueError, RuntimeError) as error:
            return has, 0, [f"DATA.IMAGE_SIZE {image_size}: {timm_name} does not support images of this size ({error})"]
    return sizes_of(module), count_parameters(module)[0], []


def _refused(key: str, value: Any, module: nn.Module, has: dict[str, Any]) -> str:
    kind = type(module).__name__
    if key not in has:
        return f"MODEL.{key} {as_text(value)}: {kind} {NO_SUCH_SIZE}; leave the key out"
    why = f"this {kind} has {as_text(has[key])}"
    return f"MODEL.{key} {as_text(value)}: {why}, which this key cannot change; leave the key out or give that value"
