"""Build the model that the MODEL section describes, with timm.

A build is first tried without weights (`Plan`), so that all problems are reported together before a run begins.
"""

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
"""Names that timm's models give to the argument for the initial value of layer scale"""
LABEL = "vitamp_name"
"""Attribute of a built model with its MODEL.NAME"""
OWN_SCALE = "own_init_values"
"""Attribute of a built model with its MODEL.INIT_VALUES"""
BYTES = 4
"""Bytes of a weight when it is initialised (fp32)"""
INITIALISERS = {"normal_", "uniform_", "erfinv_", "mul_", "add_", "clamp_", "fill_", "zero_"}
"""Operations that initialise weights"""
MOST_BLOCKS = 10_000
"""Most blocks of a model"""
UNFIT = (AssertionError, ArithmeticError, TypeError, ValueError, RuntimeError)
"""Errors that timm's models raise for arguments and images that do not suit them"""
STEPS = (16, 32, 64)
"""If a model does not take an image size, the nearest sizes divisible by one of these are tried."""
_plans: dict[tuple[str, ImageSize, int, Shortcuts], Plan] = {}
"""Plans that were made before, by the arguments of `_plan`"""


@dataclass(frozen=True)
class Plan:
    """A build that was tried without weights: the call of timm, and how the model differs from timm's."""

    timm_name: str
    """Name of the model for timm.create_model"""
    arguments: dict[str, Any]
    """Arguments for timm.create_model"""
    weights: int
    """Number of the model's weights"""
    is_label: bool
    """Whether MODEL.NAME is only a label, not a name of timm's"""
    differing: list[str]
    """Phrases about sizes that timm's model of that name does not have"""


def sizes_in(model: ModelConfig) -> dict[str, Any]:
    """Return the sizes, pooling and layer scale of the model that the settings describe.

    Sizes that are not set are those of timm's model.
    """
    sizes = given_sizes(model)
    timm_name, _ = resolve(model, sizes_given=bool(sizes))
    timms_sizes = sizes_of(_without_weights(timm_name, {}))
    return timms_sizes | sizes | {"POOL": model.POOL, "INIT_VALUES": model.INIT_VALUES}


def build_model(model: ModelConfig, image_size: ImageSize, channels: int, shortcuts: Shortcuts = NONE) -> nn.Module:
    """Build the model, with weights initialised by timm from torch's random generator in its current state.

    The adapters of MODEL.LORA are not added here, but once the frozen weights are loaded. UserError if the model cannot
    be built. `channels`: of the images. `shortcuts`: options for cheaper training.
    """
    plan = _plan(model, image_size, channels, shortcuts)
    for note in _notes(model, plan):
        log.info(note, extra=DETAIL)
    module = timm.create_model(plan.timm_name, **plan.arguments)
    vars(module).update({LABEL: model.NAME.strip(), OWN_SCALE: model.INIT_VALUES})
    origin = "timm's" if type(module).__module__.startswith("timm.") else "your own"
    purpose = ", as the encoder of a masked autoencoder" if model.MAE_PRETRAIN else ""
    log.info("Model %s: %s %s%s", model.NAME, origin, type(module).__name__, purpose, extra=DETAIL)
    return _finished(module, model, shortcuts)


def build_without_weights(
    model: ModelConfig, image_size: ImageSize, channels: int, shortcuts: Shortcuts = NONE
) -> nn.Module:
    """Build the model as it is trained, with its adapters, on torch's meta device: its weights take no memory."""
    plan = _plan(model, image_size, channels, shortcuts)
    with torch.device("meta"), _NoInitialisation():
        module = _finished(_without_weights(plan.timm_name, plan.arguments), model, shortcuts)
        if model.LORA.RANK is not None:
            from models.lora import add_adapters

            add_adapters(module, model.LORA, seed=0)
        return module


def _finished(module: nn.Module, model: ModelConfig, shortcuts: Shortcuts) -> nn.Module:
    """Change timm's model as the settings say, and return it: pooling, masked autoencoder, frozen weights.

    Frozen weights come last, since the changes before may add some.
    """
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
    """Set up timm's patch dropout: it must keep all prefix tokens, and drops nothing until an epoch begins.

    timm creates it before it adds the distillation token, so it does not know of that one. It drops nothing yet because
    trials before training must see the most expensive case.
    """
    for part in module.modules():
        if isinstance(part, PatchDropout):
            part.prob = 0.0
            part.num_prefix_tokens = getattr(module, "num_prefix_tokens", part.num_prefix_tokens)


def check_model(
    model: ModelConfig, image_size: ImageSize, channels: int, shortcuts: Shortcuts = NONE, memory: int | None = None
) -> None:
    """Raise the errors of `build_model`, without allocating weights. `memory`: that of the machine, in bytes.

    Raises UserError, too, if the weights do not fit into this memory, or if MODEL.FREEZE or MODEL.LORA match nothing.
    """
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
    """Return the name and the arguments of timm.create_model with which others can use the weights without vitamp.

    Rates of dropout and the like are left out, because they only matter in training.
    """
    plan = _plan(model, image_size, channels, NONE)
    return plan.timm_name, {name: value for name, value in plan.arguments.items() if not name.endswith("_rate")}


def describe(module: nn.Module) -> str:
    """Describe a built model in one line: its name, class, sizes and parameters."""
    class_name = type(module).__name__.removeprefix("FSDP")  # torch's fully_shard renames the class
    facts = [class_name]
    sizes = sizes_of(module)
    for key, word in SIZE_WORDS.items():
        if key in sizes:
            facts.append(f"{word} {one_line(sizes[key])}")
    masking_words = getattr(module, "masking_words", None)
    if masking_words is not None:
        facts.append(masking_words())
    total, trainable = count_parameters(module)
    if trainable == total:
        fraction = "all trainable"
    else:
        fraction = f"{trainable:,} trainable, {100 * trainable / total:.1f} %"
    return f"{vars(module).get(LABEL, class_name)} ({', '.join(facts)}), {total:,} parameters ({fraction})"


def list_models(pattern: str | None) -> list[str]:
    """List the names that MODEL.NAME accepts, sorted, filtered by a glob if there is one."""
    names = set(timm.list_models()) | set(RECIPES)
    return sorted(fnmatch.filter(names, pattern or "*"))


def _plan(model: ModelConfig, image_size: ImageSize, channels: int, shortcuts: Shortcuts) -> Plan:
    """Return the plan of a build; UserError if the model cannot be built.

    Plans are cached, because the check before the run and the run itself both need one.
    """
    key = (repr(model), image_size, channels, shortcuts)
    if key not in _plans:
        _plans[key] = _make_plan(model, image_size, channels, shortcuts)
    return _plans[key]


def _make_plan(model: ModelConfig, image_size: ImageSize, channels: int, shortcuts: Shortcuts) -> Plan:
    """Try a build without weights. UserError lists all problems with it together."""
    wanted_sizes = given_sizes(model)
    timm_name, is_label = resolve(model, sizes_given=bool(wanted_sizes))
    reference = _without_weights(timm_name, {})
    message = contradiction(model, reference)
    if message:
        raise UserError(message)

    # The arguments for timm: sizes that differ from those of its model, rates, and options for cheaper training.
    timms_sizes = sizes_of(reference)
    argument_of = arguments_of(reference)
    changed_sizes = {
        key: value for key, value in wanted_sizes.items() if key in argument_of and not same(key, value, timms_sizes)
    }
    rates, problems = _rate_arguments(model, reference)
    arguments: dict[str, Any] = {"num_classes": model.NUM_CLASSES, "in_chans": channels}
    patch = None
    if argument_of or pretrained_cfg(reference).get("fixed_input_size"):
        arguments["img_size"] = image_size
        patch = changed_sizes.get("PATCH_SIZE") or patch_of(reference)
    arguments |= {argument_of[key]: value for key, value in changed_sizes.items()}
    arguments |= rates
    if model.MAE_PRETRAIN:
        from models.masked import masking_problems

        arguments["num_classes"] = 0
        problems += masking_problems(reference, model)
    unsupported = shortcut_problems(shortcuts, reference, patch)
    if not unsupported:
        arguments |= shortcuts.arguments()

    # The trial itself, unless arithmetic shows that it would fail.
    built_sizes = timms_sizes
    weights = 0
    sizes_to_check = timms_sizes | changed_sizes if argument_of else {}
    misfits = geometry_problems(reference, sizes_to_check, patch, image_size)
    if not misfits:
        built_sizes, weights, misfits = _trial(timm_name, arguments, timms_sizes, image_size)
    for key, value in wanted_sizes.items():
        if key not in argument_of and not same(key, value, built_sizes):
            problems.append(unchangeable(key, value, reference, built_sizes))
    problems += misfits + unsupported
    if problems:
        raise UserError("The model cannot be built:\n" + "\n".join(f"  {line}" for line in problems))
    differing = [
        f"{key} {one_line(value)} (timm's: {one_line(timms_sizes.get(key))})" for key, value in changed_sizes.items()
    ]
    return Plan(timm_name, arguments, weights, is_label, differing)


def _notes(model: ModelConfig, plan: Plan) -> Iterator[str]:
    """Yield log lines about how the model differs from what its settings seem to say."""
    if plan.is_label and not given_sizes(model):  # the banner shows sizes that are given
        yield f"MODEL.NAME {model.NAME} is only a label: the model has the sizes of timm's {plan.timm_name}"
    elif plan.differing and not plan.is_label:
        difference = f"the model differs from timm's model of that name in {', '.join(plan.differing)}"
        yield f"MODEL.NAME {model.NAME} is only a label here: {difference}"
    if model.DROPOUT and "proj_drop_rate" in plan.arguments and "pos_drop_rate" not in plan.arguments:
        yield "MODEL.DROPOUT applies inside the blocks only: timm's model has no dropout after the patch embedding"


def _without_weights(timm_name: str, arguments: dict[str, Any]) -> nn.Module:
    """Build timm's model on torch's meta device, without touching torch's random generator."""
    # The fork protects the caller's random generator from what a constructor draws.
    with torch.random.fork_rng(devices=[]), torch.device("meta"), _NoInitialisation():
        return timm.create_model(timm_name, **arguments)


def is_timm_name(name: str) -> bool:
    """Tell whether timm has a model of this name. A tag after the dot must be one that timm has weights for."""
    architecture, _, tag = name.partition(".")
    if not timm.is_model(architecture):
        return False
    return not tag or name in timm.list_pretrained(f"{architecture}.*")


def timm_weights(name: str) -> PretrainedCfg | None:
    """Return timm's facts about the weights of this name, perhaps a former name; None for a model in own code."""
    current_name = timm.models.get_deprecated_models().get(name) or name
    return timm.get_pretrained_cfg(current_name)


def resolve(model: ModelConfig, sizes_given: bool) -> tuple[str, bool]:
    """Return the name of timm's model to build, and whether MODEL.NAME is only a label for it.

    With `sizes_given`, any label will do, and MODEL.TYPE decides. UserError for an unknown name without sizes.
    """
    name = model.NAME.strip()
    if name in RECIPES or is_timm_name(name):
        return RECIPES.get(name, name), False
    if name.casefold() in DEFAULTS:
        return DEFAULTS[name.casefold()], True
    if model.TYPE in DEFAULTS and sizes_given:
        return DEFAULTS[model.TYPE], True
    raise UserError(unknown_name(model, name, sizes_given))


def _rate_arguments(model: ModelConfig, module: nn.Module) -> tuple[dict[str, float], list[str]]:
    """Return timm's arguments for dropout, drop path and layer scale.

    With them, return a message for each of these settings that this kind of model does not support.
    """
    defaults = _constructor_defaults(type(module))
    # DROPOUT means dropout inside the blocks. Models without it (ResNet) have dropout in the head alone.
    block_dropouts = [name for name in ("pos_drop_rate", "proj_drop_rate") if name in defaults]
    # For some names, such as efficientformerv2_l, timm's drop path is not the default of the class. The drop path that
    # a user's own function sets stays.
    is_timms = own_named("model", model.NAME.strip()) is None
    drops_path = is_timms and any(getattr(part, "drop_prob", 0) for part in module.modules())
    no_rate = "has no such rate; set the key to 0"
    rates = [
        _Rate("DROPOUT", model.DROPOUT, block_dropouts or ["drop_rate"], no_rate),
        _Rate("ATTENTION_DROPOUT", model.ATTENTION_DROPOUT, ["attn_drop_rate"], no_rate),
        _Rate("DROPPATH", model.DROPPATH, ["drop_path_rate"], no_rate, set_by_timm=drops_path),
    ]
    if model.INIT_VALUES is not None:
        no_scale = "takes no initial value of layer scale; leave the key out"
        rates.append(_Rate("INIT_VALUES", model.INIT_VALUES, LAYER_SCALE, no_scale))
    arguments: dict[str, float] = {}
    problems = []
    for rate in rates:
        supported = [name for name in rate.arguments if name in defaults]
        if rate.value and not supported:
            problems.append(f"MODEL.{rate.key} {rate.value:g}: {type(module).__name__} {rate.problem}")
        for name in supported:
            # A rate of 0 is passed only if timm's is not 0, as for Swin's drop path: 0 in the YAML means 0.
            if rate.value or defaults[name] or rate.set_by_timm:
                arguments[name] = rate.value
    return arguments, problems


@dataclass(frozen=True)
class _Rate:
    """A rate of the MODEL section, or the initial value of layer scale, and timm's arguments for it."""

    key: str
    value: float
    arguments: Sequence[str]
    """Names of timm's arguments for it"""
    problem: str
    """End of the message about a model that has none of these arguments"""
    set_by_timm: bool = False
    """Whether timm sets it for this name, though it is 0 by default"""


def _constructor_defaults(model_class: type[nn.Module]) -> dict[str, Any]:
    """Return the arguments of a class's constructor and of its base classes, with their defaults."""
    defaults: dict[str, Any] = {}
    for base in model_class.__mro__:
        for name, parameter in inspect.signature(base.__init__).parameters.items():
            defaults.setdefault(name, parameter.default)
            for annotated in get_args(parameter.annotation):  # NaFlexVit takes the fields of its configuration
                fields = getattr(annotated, "__dataclass_fields__", {})
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
    timm_name: str, arguments: dict[str, Any], timms_sizes: dict[str, Any], image_size: ImageSize
) -> tuple[dict[str, Any], int, list[str]]:
    """Build the model without weights, and run it once if its image size can only be checked so.

    Returns its sizes, the number of its weights, and problems, such as timm's errors. After a failure, the sizes are
    `timms_sizes`.
    """
    depths = arguments.get("depths", arguments.get("depth", 0))
    blocks = sum(depths) if isinstance(depths, tuple) else depths
    if blocks > MOST_BLOCKS:  # building them would take minutes even without weights
        return timms_sizes, 0, [f"{blocks:,} blocks; at most {MOST_BLOCKS:,} are supported"]
    argument_list = ", ".join(f"{name}={value}" for name, value in arguments.items())
    problem = f"timm cannot build {timm_name} with {argument_list}"
    try:
        module = _without_weights(timm_name, arguments).eval()
        if not arguments_of(module):  # image sizes of ViT and Swin are checked by arithmetic
            problem = f"DATA.IMAGE_SIZE {one_line(image_size)}: {timm_name} does not support images of this size"
            _run_once(module, arguments["in_chans"], image_size)
    except UNFIT as error:
        reason = str(error) or type(error).__name__
        possible_sizes = _possible_image_sizes(timm_name, arguments, image_size)
        return timms_sizes, 0, [f"{problem}: {reason}{possible_sizes}"]
    weights, _ = count_parameters(module)
    return sizes_of(module), weights, []


def _run_once(module: nn.Module, channels: int, image_size: ImageSize) -> None:
    """Run a model without weights on an image of this size, which raises an error if it does not take it."""
    high, wide = sides(image_size)
    # A model whose operations depend on values cannot run without them; it counts as taking the size.
    with torch.no_grad(), contextlib.suppress(NotImplementedError):
        module(torch.empty(1, channels, high, wide, device="meta"))


def _possible_image_sizes(timm_name: str, arguments: dict[str, Any], image_size: ImageSize) -> str:
    """Name the nearest image sizes that timm's model takes, or else its own, as '; possible: IMAGE_SIZE 192 or 224'.

    The result is '' if none of them fits.
    """
    candidates = [divisible_sizes(image_size, step) for step in STEPS]
    timms_config = timm.get_pretrained_cfg(timm_name)
    if timms_config is not None:
        candidates.append([size_of(timms_config.input_size[1:])])
    for sizes in candidates:
        possible = [one_line(size) for size in sizes if _takes_size(timm_name, arguments, size)]
        if possible:
            return f"; possible: IMAGE_SIZE {' or '.join(possible)}"
    return ""


def _takes_size(timm_name: str, arguments: dict[str, Any], size: ImageSize) -> bool:
    """Tell whether timm's model with these arguments takes images of this size."""
    if "img_size" in arguments:
        arguments = arguments | {"img_size": size}
    try:
        _run_once(_without_weights(timm_name, arguments).eval(), arguments["in_chans"], size)
    except UNFIT:
        return False
    return True
