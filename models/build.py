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
    geometry_problems,
    nearest_divisible_sizes,
    shortcut_problems,
    unchangeable,
    unknown_name,
)
from models.sizes import (
    MODEL_OF_TYPE,
    NONE,
    RECIPE_MODELS,
    SIZE_WORDS,
    Shortcuts,
    given_sizes,
    patch_of,
    same,
    size_arguments_of,
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
BYTES_PER_WEIGHT = 4
"""Bytes of a weight when it is initialised (fp32)"""
INITIALISERS = {"normal_", "uniform_", "erfinv_", "mul_", "add_", "clamp_", "fill_", "zero_"}
"""Operations that initialise weights"""
MOST_BLOCKS = 10_000
"""Most blocks of a model"""
UNFIT_ERRORS = (AssertionError, ArithmeticError, TypeError, ValueError, RuntimeError)
"""Errors that timm's models raise for arguments and images that do not suit them"""
SIZE_STEPS = (16, 32, 64)
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
    weight_count: int
    """Number of the model's weights"""
    is_label: bool
    """Whether MODEL.NAME is only a label, not a name of timm's"""
    differing: list[str]
    """Phrases about sizes that timm's model of that name does not have"""


def sizes_in(model: ModelConfig) -> dict[str, Any]:
    """Return the sizes, pooling and layer scale of the model that the settings describe.

    Sizes that are not set are those of timm's model.
    """
    sizes_in_settings = given_sizes(model)
    timm_name, _ = resolve(model, sizes_given=bool(sizes_in_settings))
    timms_model = _without_weights(timm_name, arguments={})
    return sizes_of(timms_model) | sizes_in_settings | {"POOL": model.POOL, "INIT_VALUES": model.INIT_VALUES}


def build_model(model: ModelConfig, image_size: ImageSize, channels: int, shortcuts: Shortcuts = NONE) -> nn.Module:
    """Build the model, with weights initialised by timm from torch's random generator in its current state.

    The adapters of MODEL.LORA are not added here, but once the frozen weights are loaded. UserError if the model cannot
    be built. `channels`: number of image channels. `shortcuts`: options for cheaper training.
    """
    plan = _plan(model, image_size, channels, shortcuts)
    for note in _notes(model, plan):
        log.info(note, extra=DETAIL)
    module = timm.create_model(plan.timm_name, **plan.arguments)
    # Read later by `describe` and by errors about weights that do not fit.
    vars(module).update({LABEL: model.NAME.strip(), OWN_SCALE: model.INIT_VALUES})
    origin = "timm's" if type(module).__module__.startswith("timm.") else "your own"
    purpose = ", as the encoder of a masked autoencoder" if model.MAE_PRETRAIN else ""
    log.info("Model %s: %s %s%s", model.NAME, origin, type(module).__name__, purpose, extra=DETAIL)
    return _apply_settings(module, model, shortcuts)


def build_without_weights(
    model: ModelConfig, image_size: ImageSize, channels: int, shortcuts: Shortcuts = NONE
) -> nn.Module:
    """Build the model as it is trained, with its adapters, on torch's meta device: its weights take no memory."""
    plan = _plan(model, image_size, channels, shortcuts)
    with torch.device("meta"), _NoInitialisation():
        module = _apply_settings(_without_weights(plan.timm_name, plan.arguments), model, shortcuts)
        if model.LORA.RANK is not None:
            from models.lora import add_adapters

            add_adapters(module, model.LORA, seed=0)
        return module


def _apply_settings(module: nn.Module, model: ModelConfig, shortcuts: Shortcuts) -> nn.Module:
    """Change a model that timm has built as the settings say, and return it.

    Weights are frozen last, because the pooling and the masked autoencoder may add weights.
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
    """Set up timm's patch dropout: it must keep all prefix tokens, and must drop nothing until an epoch begins.

    timm creates the layer before it adds the distillation token, so the layer's number of prefix tokens is corrected
    here. Trials before training must see the most expensive case, in which no tokens are dropped.
    """
    for part in module.modules():
        if isinstance(part, PatchDropout):
            part.prob = 0.0
            part.num_prefix_tokens = getattr(module, "num_prefix_tokens", part.num_prefix_tokens)


def check_model(
    model: ModelConfig, image_size: ImageSize, channels: int, shortcuts: Shortcuts = NONE, memory: int | None = None
) -> None:
    """Raise the errors of `build_model`, without allocating weights.

    Raises UserError, too, if the weights do not fit into the machine's `memory` (in bytes; None: not checked), or if
    MODEL.FREEZE or MODEL.LORA match nothing.
    """
    plan = _plan(model, image_size, channels, shortcuts)
    weight_bytes = plan.weight_count * BYTES_PER_WEIGHT
    if memory is not None and weight_bytes > memory:
        raise UserError(
            f"The model has {plan.weight_count:,} weights, which take {weight_bytes / 2**30:,.0f} GiB in fp32; this "
            f"machine has {memory / 2**30:,.0f} GiB. Use a smaller MODEL.EMBED_DIM, DEPTH,"
            " NUM_CLASSES or DATA.IMAGE_SIZE."
        )
    if model.FREEZE or model.LORA.RANK is not None:
        # Raises UserError if MODEL.FREEZE or MODEL.LORA match nothing.
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
    names = set(timm.list_models()) | set(RECIPE_MODELS)
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
    """Choose timm's arguments, and try the build without weights. UserError lists all problems with it together."""
    sizes_in_settings = given_sizes(model)
    timm_name, is_label = resolve(model, sizes_given=bool(sizes_in_settings))
    reference = _without_weights(timm_name, {})
    message = contradiction(model, reference)
    if message:
        raise UserError(message)

    # Sizes in the settings that differ from those of timm's model.
    timms_sizes = sizes_of(reference)
    argument_of = size_arguments_of(reference)  # empty for models other than ViT and Swin
    changed_sizes = {
        key: value
        for key, value in sizes_in_settings.items()
        if key in argument_of and not same(key, value, timms_sizes)
    }

    # Arguments for timm: the image size, changed sizes, rates, and options for cheaper training.
    arguments: dict[str, Any] = {"num_classes": model.NUM_CLASSES, "in_chans": channels}
    patch = None  # the side of the patches, by which the image size must be divisible
    takes_img_size = bool(argument_of or pretrained_cfg(reference).get("fixed_input_size"))
    if takes_img_size:
        arguments["img_size"] = image_size
        patch = changed_sizes.get("PATCH_SIZE") or patch_of(reference)
    arguments |= {argument_of[key]: value for key, value in changed_sizes.items()}
    rates, problems = _rate_arguments(model, reference)
    arguments |= rates
    if model.MAE_PRETRAIN:
        from models.masked import masking_problems

        arguments["num_classes"] = 0
        problems += masking_problems(reference, model)
    unsupported_options = shortcut_problems(shortcuts, reference, patch)
    if not unsupported_options:
        arguments |= shortcuts.arguments()

    # The trial itself, unless arithmetic shows that it would fail. Without it, the model counts as built with timm's
    # sizes. Heads and widths are only checked where the settings can change them.
    built_sizes = timms_sizes
    weight_count = 0
    sizes_to_check = timms_sizes | changed_sizes if argument_of else {}
    build_problems = geometry_problems(reference, sizes_to_check, patch, image_size)
    if not build_problems:
        built_sizes, weight_count, build_problems = _trial(timm_name, arguments, timms_sizes, image_size)
    for key, value in sizes_in_settings.items():
        if key not in argument_of and not same(key, value, built_sizes):
            problems.append(unchangeable(key, value, reference, built_sizes))

    problems += build_problems + unsupported_options
    if problems:
        raise UserError("The model cannot be built:\n" + "\n".join(f"  {line}" for line in problems))
    differing = [
        f"{key} {one_line(value)} (timm's: {one_line(timms_sizes.get(key))})" for key, value in changed_sizes.items()
    ]
    return Plan(timm_name, arguments, weight_count, is_label, differing)


def _notes(model: ModelConfig, plan: Plan) -> Iterator[str]:
    """Yield log lines about how the model differs from what its settings seem to say."""
    has_sizes = bool(given_sizes(model))
    if plan.is_label and not has_sizes:  # timm has no such name, and no setting says the sizes, so they are logged
        yield f"MODEL.NAME {model.NAME} is only a label: the model has the sizes of timm's {plan.timm_name}"
    elif plan.differing and not plan.is_label:  # timm has a model of this name, but with other sizes
        difference = f"the model differs from timm's model of that name in {', '.join(plan.differing)}"
        yield f"MODEL.NAME {model.NAME} is only a label here: {difference}"
    timm_arguments = plan.arguments
    if model.DROPOUT and "proj_drop_rate" in timm_arguments and "pos_drop_rate" not in timm_arguments:
        yield "MODEL.DROPOUT applies inside the blocks only: timm's model has no dropout after the patch embedding"


def _without_weights(timm_name: str, arguments: dict[str, Any]) -> nn.Module:
    """Build timm's model on torch's meta device, where weights take no memory, and return it.

    Torch's random generator stays as it is.
    """
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
    """Return the name of timm's model to build, and whether MODEL.NAME is only a label, which timm does not know.

    With `sizes_given`, the settings have sizes of the model. Then any label will do, and MODEL.TYPE decides which of
    timm's models gets these sizes. UserError for an unknown name without sizes.
    """
    name = model.NAME.strip()
    if name in RECIPE_MODELS or is_timm_name(name):
        return RECIPE_MODELS.get(name, name), False
    # PaddleViT's default for NAME is a type, such as 'vit', which names no model.
    if name.casefold() in MODEL_OF_TYPE:
        return MODEL_OF_TYPE[name.casefold()], True
    if model.TYPE in MODEL_OF_TYPE and sizes_given:
        return MODEL_OF_TYPE[model.TYPE], True
    raise UserError(unknown_name(model, name, sizes_given))


def _rate_arguments(model: ModelConfig, module: nn.Module) -> tuple[dict[str, float], list[str]]:
    """Return timm's arguments for dropout, drop path and layer scale, and a list of problems.

    The problems are messages about those of these settings that this kind of model does not support.
    """
    defaults = _constructor_defaults(type(module))
    # DROPOUT means dropout inside the blocks. Models without it (ResNet) have dropout in the head alone.
    dropouts = [name for name in ("pos_drop_rate", "proj_drop_rate") if name in defaults] or ["drop_rate"]
    # For some names, such as efficientformerv2_l, timm sets a drop path although the default of the class is 0. Then
    # DROPPATH 0 must be passed, too. The drop path that a user's own function sets stays.
    is_timms = own_named("model", model.NAME.strip()) is None
    drops_path = is_timms and any(getattr(part, "drop_prob", 0) for part in module.modules())
    no_rate = "has no such rate; set the key to 0"
    rates = [
        _Rate("DROPOUT", model.DROPOUT, dropouts, problem=no_rate),
        _Rate("ATTENTION_DROPOUT", model.ATTENTION_DROPOUT, ["attn_drop_rate"], problem=no_rate),
        _Rate("DROPPATH", model.DROPPATH, ["drop_path_rate"], problem=no_rate, set_by_timm=drops_path),
    ]
    if model.INIT_VALUES is not None:
        no_scale = "takes no initial value of layer scale; leave the key out"
        rates.append(_Rate("INIT_VALUES", model.INIT_VALUES, LAYER_SCALE, problem=no_scale))
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
    """Return the arguments of a class's constructor and of its base classes, with their defaults.

    The arguments of NaFlexVit are the fields of a dataclass: its constructor takes `cfg: Optional[NaFlexVitCfg]`.
    """
    defaults: dict[str, Any] = {}
    for base in model_class.__mro__:
        for name, parameter in inspect.signature(base.__init__).parameters.items():
            defaults.setdefault(name, parameter.default)
            for annotated in get_args(parameter.annotation):  # such as NaFlexVitCfg and None
                fields = getattr(annotated, "__dataclass_fields__", {})
                defaults |= {key: field.default for key, field in fields.items()}
    return defaults


class _NoInitialisation(TorchFunctionMode):
    """Skips the initialisation of weights on the meta device, which would take most of the time and import sympy."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Call a function of torch, unless it would initialise a tensor on the meta device: return that as it is."""
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
    `timms_sizes`, those of timm's model with default arguments, and the number of weights is 0.
    """
    depths = arguments.get("depths", arguments.get("depth", 0))  # a tuple for Swin, a number for ViT
    blocks = sum(depths) if isinstance(depths, tuple) else depths
    if blocks > MOST_BLOCKS:  # building them would take minutes even without weights
        return timms_sizes, 0, [f"{blocks:,} blocks; at most {MOST_BLOCKS:,} are supported"]
    argument_list = ", ".join(f"{name}={value}" for name, value in arguments.items())
    problem_if_step_fails = f"timm cannot build {timm_name} with {argument_list}"
    try:
        module = _without_weights(timm_name, arguments).eval()
        is_vit_or_swin = bool(size_arguments_of(module))  # for these, arithmetic has checked the image size
        if not is_vit_or_swin:
            problem_if_step_fails = (
                f"DATA.IMAGE_SIZE {one_line(image_size)}: {timm_name} does not support images of this size"
            )
            _run_once(module, arguments["in_chans"], image_size)
    except UNFIT_ERRORS as error:
        reason = str(error) or type(error).__name__
        possible_sizes = _possible_image_sizes(timm_name, arguments, image_size)
        return timms_sizes, 0, [f"{problem_if_step_fails}: {reason}{possible_sizes}"]
    weight_count, _ = count_parameters(module)
    return sizes_of(module), weight_count, []


def _run_once(module: nn.Module, channels: int, image_size: ImageSize) -> None:
    """Run a model without weights on an image of this size, which raises an error if it does not take it."""
    high, wide = sides(image_size)
    # A model whose operations depend on values cannot run without them; it counts as taking the size.
    with torch.no_grad(), contextlib.suppress(NotImplementedError):
        module(torch.empty(1, channels, high, wide, device="meta"))


def _possible_image_sizes(timm_name: str, arguments: dict[str, Any], image_size: ImageSize) -> str:
    """Name image sizes that timm's model takes, as '; possible: IMAGE_SIZE 192 or 224'; '' if it takes none of those.

    They are the nearest sizes divisible by 16, or else by 32 or 64, or else the size of timm's pretrained weights.
    """
    candidates = [nearest_divisible_sizes(image_size, step) for step in SIZE_STEPS]
    timms_config = timm.get_pretrained_cfg(timm_name)
    if timms_config is not None:
        candidates.append([size_of(timms_config.input_size[1:])])  # input_size: channels, height, width
    for sizes in candidates:
        possible = [one_line(size) for size in sizes if _model_takes_size(timm_name, arguments, size)]
        if possible:
            return f"; possible: IMAGE_SIZE {' or '.join(possible)}"
    return ""


def _model_takes_size(timm_name: str, arguments: dict[str, Any], size: ImageSize) -> bool:
    """Tell whether timm's model with these arguments, built for images of this size, runs without an error."""
    if "img_size" in arguments:
        arguments = arguments | {"img_size": size}
    try:
        _run_once(_without_weights(timm_name, arguments).eval(), arguments["in_chans"], size)
    except UNFIT_ERRORS:
        return False
    return True
