"""Building the model of the MODEL section with timm."""

from __future__ import annotations

import contextlib
import fnmatch
import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, get_args

import timm
import torch
from timm.layers.patch_dropout import PatchDropout
from timm.models import PretrainedCfg
from torch import nn
from torch.overrides import TorchFunctionMode

from models.parts import count_parameters, pretrained_cfg
from models.refusals import (
    contradiction,
    divisible_sizes,
    geometry_problems,
    shortcut_problems,
    unchangeable,
    unknown_name,
)
from models.sizes import (
    DEFAULTS,
    NONE,
    RECIPES,
    SIZE_WORDS,
    Shortcuts,
    arguments_of,
    given_sizes,
    patch_of,
    same,
    sizes_of,
)
from utils.config.kinds import one_line
from utils.config.model import ModelConfig
from utils.errors import UserError
from utils.log import DETAIL, log
from vitamp.registry import own_named
from vitamp.sizes import ImageSize, sides, size_of

LAYER_SCALE = ("init_values", "ls_init_value", "eta")
"""Names of the initial value of layer scale in timm's models"""
LABEL = "vitamp_name"
"""Attribute of a built model with its MODEL.NAME"""
OWN_SCALE = "own_init_values"
"""Attribute of a built model with its MODEL.INIT_VALUES"""
BYTES = 4
"""Bytes of a weight when it is initialised."""
INITIALISERS = {"normal_", "uniform_", "erfinv_", "mul_", "add_", "clamp_", "fill_", "zero_"}
"""Operations that initialise weights"""
MOST_BLOCKS = 10_000
UNFIT = (AssertionError, ArithmeticError, TypeError, ValueError, RuntimeError)
"""What timm's models raise for arguments and images that do not suit them"""
STEPS = (16, 32, 64)
"""Sizes divisible by one of them are tried in place of one that a model does not take"""
_plans: dict[tuple[str, ImageSize, int, Shortcuts], Plan] = {}


@dataclass(frozen=True)
class Plan:
    """A build that was tried without weights: timm's name and arguments, and how the model differs from timm's."""

    timm_name: str
    arguments: dict[str, Any]
    weights: int
    """Number of its weights"""
    is_label: bool
    """Whether MODEL.NAME is only a label"""
    differing: list[str]
    """Sizes that timm's model of that name does not have, in words"""


def sizes_in(model: ModelConfig) -> dict[str, Any]:
    """Sizes, pooling and layer scale of the model that the settings describe; sizes not given are timm's."""
    sizes = given_sizes(model)
    timm_name, _ = resolve(model, sizes_given=bool(sizes))
    of_timm = sizes_of(_without_weights(timm_name, {}))
    return of_timm | sizes | {"POOL": model.POOL, "INIT_VALUES": model.INIT_VALUES}


def build_model(model: ModelConfig, image_size: ImageSize, channels: int, shortcuts: Shortcuts = NONE) -> nn.Module:
    """A model with weights initialised by timm, from torch's random generator in its current state.

    Without the adapters of MODEL.LORA, which are added once the frozen weights are loaded.
    """
    plan = _plan(model, image_size, channels, shortcuts)
    for note in _notes(model, plan):
        log.info(note, extra=DETAIL)
    module = timm.create_model(plan.timm_name, **plan.arguments)
    vars(module).update({LABEL: model.NAME.strip(), OWN_SCALE: model.INIT_VALUES})
    whose = "timm's" if type(module).__module__.startswith("timm.") else "your own"
    masked = ", as the encoder of a masked autoencoder" if model.MAE_PRETRAIN else ""
    log.info("Model %s: %s %s%s", model.NAME, whose, type(module).__name__, masked, extra=DETAIL)
    return _finished(module, model, shortcuts)


def build_without_weights(
    model: ModelConfig, image_size: ImageSize, channels: int, shortcuts: Shortcuts = NONE
) -> nn.Module:
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
    if shortcuts.token_drop:
        _prepare_token_drop(module)
    if model.POOL is not None:
        from vitamp.pooling import pool_by

        pool_by(module, model.POOL)
    if model.MAE_PRETRAIN:
        from models.masked import masked_autoencoder

        module = masked_autoencoder(module, model)
    if model.FREEZE:
        from models.freeze import freeze

        freeze(module, model.FREEZE)
    return module


def _prepare_token_drop(module: nn.Module) -> None:
    """Tell patch dropouts of all prefix tokens, and let them drop nothing yet."""
    # timm creates the patch dropout before it adds the distillation token. No patches are dropped until an epoch
    # begins: trials before training must see the most expensive case.
    for part in module.modules():
        if isinstance(part, PatchDropout):
            part.prob = 0.0
            part.num_prefix_tokens = getattr(module, "num_prefix_tokens", part.num_prefix_tokens)


def check_model(
    model: ModelConfig, image_size: ImageSize, channels: int, shortcuts: Shortcuts = NONE, memory: int | None = None
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

            require_calls(module, model.LORA, (channels, *sides(image_size)))


def timm_call(model: ModelConfig, image_size: ImageSize, channels: int) -> tuple[str, dict[str, Any]]:
    """Arguments of timm.create_model for using the weights without vitamp; without rates, which matter in training."""
    plan = _plan(model, image_size, channels, NONE)
    return plan.timm_name, {name: value for name, value in plan.arguments.items() if not name.endswith("_rate")}


def describe(module: nn.Module) -> str:
    """One line with the model's name, class, sizes and parameters."""
    kind = type(module).__name__.removeprefix("FSDP")  # torch's fully_shard renames the class
    parts = [kind]
    sizes = sizes_of(module)
    for key, word in SIZE_WORDS.items():
        if key in sizes:
            parts.append(f"{word} {one_line(sizes[key])}")
    masking_words = getattr(module, "masking_words", None)
    if masking_words is not None:
        parts.append(masking_words())
    total, trainable = count_parameters(module)
    if trainable == total:
        fraction = "all trainable"
    else:
        fraction = f"{trainable:,} trainable, {100 * trainable / total:.1f} %"
    return f"{vars(module).get(LABEL, kind)} ({', '.join(parts)}), {total:,} parameters ({fraction})"


def list_models(pattern: str | None) -> list[str]:
    """Names that MODEL.NAME accepts, filtered by a glob."""
    names = set(timm.list_models()) | set(RECIPES)
    return sorted(fnmatch.filter(names, pattern or "*"))


def _plan(model: ModelConfig, image_size: ImageSize, channels: int, shortcuts: Shortcuts) -> Plan:
    """Check all about a build that can be checked without weights, and report all problems together.

    Cached, because the check before the run and the run itself both need it.
    """
    key = (repr(model), image_size, channels, shortcuts)
    if key not in _plans:
        _plans[key] = _make_plan(model, image_size, channels, shortcuts)
    return _plans[key]


def _make_plan(model: ModelConfig, image_size: ImageSize, channels: int, shortcuts: Shortcuts) -> Plan:
    wanted = given_sizes(model)
    timm_name, is_label = resolve(model, sizes_given=bool(wanted))
    reference = _without_weights(timm_name, {})
    message = contradiction(model, reference)
    if message:
        raise UserError(message)

    has = sizes_of(reference)
    takes = arguments_of(reference)
    changed = {name: value for name, value in wanted.items() if name in takes and not same(name, value, has)}
    rates, problems = _rate_arguments(model, reference)
    arguments: dict[str, Any] = {"num_classes": model.NUM_CLASSES, "in_chans": channels}
    patch = None
    if takes or pretrained_cfg(reference).get("fixed_input_size"):
        arguments["img_size"] = image_size
        patch = changed.get("PATCH_SIZE") or patch_of(reference)
    arguments |= {takes[name]: value for name, value in changed.items()}
    arguments |= rates
    if model.MAE_PRETRAIN:
        from models.masked import masking_problems

        arguments["num_classes"] = 0
        problems += masking_problems(reference, model)
    unsupported = shortcut_problems(shortcuts, reference, patch)
    if not unsupported:
        arguments |= shortcuts.arguments()

    built = has
    weights = 0
    sizes = has | changed if takes else {}
    unfit = geometry_problems(reference, sizes, patch, image_size)
    if not unfit:
        built, weights, unfit = _trial(timm_name, arguments, has, image_size)
    for name, value in wanted.items():
        if name not in takes and not same(name, value, built):
            problems.append(unchangeable(name, value, reference, built))
    problems += unfit + unsupported
    if problems:
        raise UserError("The model cannot be built:\n" + "\n".join(f"  {line}" for line in problems))
    differing = [f"{name} {one_line(value)} (timm's: {one_line(has.get(name))})" for name, value in changed.items()]
    return Plan(timm_name, arguments, weights, is_label, differing)


def _notes(model: ModelConfig, plan: Plan) -> Iterator[str]:
    """How the model differs from what its settings seem to say."""
    if plan.is_label and not given_sizes(model):  # the banner shows sizes that are given
        yield f"MODEL.NAME {model.NAME} is only a label: the model has the sizes of timm's {plan.timm_name}"
    elif plan.differing and not plan.is_label:
        what = f"the model differs from timm's model of that name in {', '.join(plan.differing)}"
        yield f"MODEL.NAME {model.NAME} is only a label here: {what}"
    if model.DROPOUT and "proj_drop_rate" in plan.arguments and "pos_drop_rate" not in plan.arguments:
        yield "MODEL.DROPOUT applies inside the blocks only: timm's model has no dropout after the patch embedding"


def _without_weights(timm_name: str, arguments: dict[str, Any]) -> nn.Module:
    # The fork protects the caller's random generator from what a constructor draws.
    with torch.random.fork_rng(devices=[]), torch.device("meta"), _NoInitialisation():
        return timm.create_model(timm_name, **arguments)


def is_timm_name(name: str) -> bool:
    """Whether timm has a model of this name; a tag after the dot must be one that timm has weights for."""
    architecture, _, tag = name.partition(".")
    if not timm.is_model(architecture):
        return False
    return not tag or name in timm.list_pretrained(f"{architecture}.*")


def timm_weights(name: str) -> PretrainedCfg | None:
    """timm's facts about the weights of this name, perhaps a former one; None for a model of one's own code."""
    return timm.get_pretrained_cfg(timm.models.get_deprecated_models().get(name) or name)


def resolve(model: ModelConfig, sizes_given: bool) -> tuple[str, bool]:
    """timm's model, and whether MODEL.NAME is only a label. With `sizes_given`, any label will do."""
    name = model.NAME.strip()
    if name in RECIPES or is_timm_name(name):
        return RECIPES.get(name, name), False
    if name.casefold() in DEFAULTS:
        return DEFAULTS[name.casefold()], True
    if model.TYPE in DEFAULTS and sizes_given:
        return DEFAULTS[model.TYPE], True
    raise UserError(unknown_name(model, name, sizes_given))


def _rate_arguments(model: ModelConfig, module: nn.Module) -> tuple[dict[str, float], list[str]]:
    """timm's arguments for the rates and the layer scale, and problems with those that this model does not have."""
    defaults = _constructor_defaults(type(module))
    # DROPOUT means dropout inside the blocks; models without it (ResNet) have dropout in the head alone.
    inside = [name for name in ("pos_drop_rate", "proj_drop_rate") if name in defaults]
    # For some names, such as efficientformerv2_l, timm's drop path is not the default of the class. What a user's
    # function sets, stays.
    is_timms = own_named("model", model.NAME.strip()) is None
    drops_path = is_timms and any(getattr(part, "drop_prob", 0) for part in module.modules())
    no_rate = "has no such rate; set the key to 0"
    rates = [
        _Rate("DROPOUT", model.DROPOUT, inside or ["drop_rate"], no_rate),
        _Rate("ATTENTION_DROPOUT", model.ATTENTION_DROPOUT, ["attn_drop_rate"], no_rate),
        _Rate("DROPPATH", model.DROPPATH, ["drop_path_rate"], no_rate, set_by_timm=drops_path),
    ]
    if model.INIT_VALUES is not None:
        no_scale = "takes no initial value of layer scale; leave the key out"
        rates.append(_Rate("INIT_VALUES", model.INIT_VALUES, LAYER_SCALE, no_scale))
    arguments: dict[str, float] = {}
    problems = []
    for rate in rates:
        known = [name for name in rate.names if name in defaults]
        if rate.value and not known:
            problems.append(f"MODEL.{rate.key} {rate.value:g}: {type(module).__name__} {rate.lacking}")
        for name in known:
            # A rate of 0 is passed only if timm's is not 0, as for Swin's drop path: 0 in the YAML means 0.
            if rate.value or defaults[name] or rate.set_by_timm:
                arguments[name] = rate.value
    return arguments, problems


@dataclass(frozen=True)
class _Rate:
    """A rate of the MODEL section."""

    key: str
    value: float
    names: Sequence[str]
    """timm's arguments for it"""
    lacking: str
    """What to say of a model that has none of them"""
    set_by_timm: bool = False


def _constructor_defaults(kind: type[nn.Module]) -> dict[str, Any]:
    """Arguments of a class's constructor with their defaults, including those passed on to its base classes."""
    defaults: dict[str, Any] = {}
    for base in kind.__mro__:
        for name, parameter in inspect.signature(base.__init__).parameters.items():
            defaults.setdefault(name, parameter.default)
            for part in get_args(parameter.annotation):  # NaFlexVit takes the fields of its configuration
                fields = getattr(part, "__dataclass_fields__", {})
                defaults |= {key: field.default for key, field in fields.items()}
    return defaults


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
    timm_name: str, arguments: dict[str, Any], has: dict[str, Any], image_size: ImageSize
) -> tuple[dict[str, Any], int, list[str]]:
    """Build the model and run it once without weights.

    Returns its sizes (`has` after a failure), the number of its weights, and problems, such as timm's errors.
    """
    depths = arguments.get("depths", arguments.get("depth", 0))
    blocks = sum(depths) if isinstance(depths, tuple) else depths
    if blocks > MOST_BLOCKS:  # building them would take minutes even without weights
        return has, 0, [f"{blocks:,} blocks; at most {MOST_BLOCKS:,} are supported"]
    words = ", ".join(f"{name}={value}" for name, value in arguments.items())
    fault = f"timm cannot build {timm_name} with {words}"
    try:
        module = _without_weights(timm_name, arguments).eval()
        if not arguments_of(module):  # image sizes of ViT and Swin are checked by arithmetic
            fault = f"DATA.IMAGE_SIZE {one_line(image_size)}: {timm_name} does not support images of this size"
            _run_once(module, arguments["in_chans"], image_size)
    except UNFIT as error:
        reason = str(error) or type(error).__name__
        other = _other_sizes(timm_name, arguments, image_size)
        return has, 0, [f"{fault}: {reason}{other}"]
    number, _ = count_parameters(module)
    return sizes_of(module), number, []


def _run_once(module: nn.Module, channels: int, image_size: ImageSize) -> None:
    # A model whose operations depend on values cannot run without them.
    high, wide = sides(image_size)
    with torch.no_grad(), contextlib.suppress(NotImplementedError):
        module(torch.empty(1, channels, high, wide, device="meta"))


def _other_sizes(timm_name: str, arguments: dict[str, Any], image_size: ImageSize) -> str:
    """'; possible: IMAGE_SIZE 192 or 224': the nearest sizes that timm's model takes, or its own; '' if none fits."""
    tried = [divisible_sizes(image_size, step) for step in STEPS]
    known = timm.get_pretrained_cfg(timm_name)
    if known is not None:
        tried.append([size_of(known.input_size[1:])])
    for sizes in tried:
        possible = [one_line(size) for size in sizes if _takes_size(timm_name, arguments, size)]
        if possible:
            return f"; possible: IMAGE_SIZE {' or '.join(possible)}"
    return ""


def _takes_size(timm_name: str, arguments: dict[str, Any], size: ImageSize) -> bool:
    if "img_size" in arguments:
        arguments = arguments | {"img_size": size}
    try:
        _run_once(_without_weights(timm_name, arguments).eval(), arguments["in_chans"], size)
    except UNFIT:
        return False
    return True
