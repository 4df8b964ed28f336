"""Loading pretrained weights into a built model: timm's filters adapt them, then all are loaded or none."""

import argparse
import contextlib
import importlib
import inspect
import math
import re
import shlex
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from timm.layers.pos_embed import resample_abs_pos_embed
from timm.models import adapt_input_conv, load_state_dict
from timm.models.mlp_mixer import MlpMixer
from torch import Tensor, nn

from models.build import OWN_SCALE, sizes_in
from models.masked import DECODER, MaskedAutoencoder
from models.parts import classifiers, is_inside, names_in_cfg, pretrained_cfg
from models.sizes import RESIZED, SIZE_WORDS, given_sizes, sizes_of
from models.weights.find import PADDLE, WeightFiles, locate, model_of_run, size_of_run, unreadable
from models.weights.paddle import OF_A_CLASSIFIER, Converted, convert, keys_of_weights, read_pdparams, sizes_of_weights
from utils.config.kinds import one_line
from utils.errors import UserError
from utils.log import log
from vitamp.checkpoints import LORA, seal_of, sha256_of, verified_base
from vitamp.meta import META, Adapters, check_fields, unchecked_meta
from vitamp.pooling import OWN_POOL
from vitamp.sizes import ImageSize, in_pixels, sides
from vitamp.tensors import JoinedShards, Merged, is_adapter

COUNTER = ".num_batches_tracked"
"""Of a batch norm: older files have none, and torch loads them too"""
MOST_NAMED = 5
"""Tensors of each kind that an error names"""
FRESH = "freshly initialised"
OTHER_SIZE = "timm cannot resize the position embedding of this kind of model; use the DATA.IMAGE_SIZE of the weights"
BY_PATCH = "pos_embed|patch_pos|attention_bias"
"""In the names of weights that depend on the grid of patches"""
STARTS = {"zero": "starts at zeros", "probe": "is replaced by a linear probe"}
"""Of a new classifier, by MODEL.NEW_CLASSIFIER; any other stays as it is"""
REPLACED = f"{{}} {FRESH} ({{}} classes in the file, {{}} in the model)"

MISFITS = (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
"""What timm's readers raise for weights of another model"""

Weights = dict[str, Tensor]


class Loaded(NamedTuple):
    """What became of a file of weights."""

    words: str
    """What was loaded"""
    changes: list[str]
    """What was changed for it"""
    is_partly_new: bool
    """Whether parts of the model stay freshly initialised"""


def load_pretrained(
    module: nn.Module, source: str, name: str, new_classifier: bool | str = False, complete: bool = False
) -> str:
    """Load weights from `source` into the model called `name`; returns a sentence for the log about what was loaded.

    `new_classifier`: keep the model's own classifier; as MODEL.NEW_CLASSIFIER says. `complete`: refuse weights that
    leave a classifier freshly initialised, as evaluation needs.
    """
    start = f"left as {FRESH}"
    if not complete:
        start = STARTS.get(str(new_classifier), start)
    found = locate(source)
    assert found is not None  # downloaded, or an error was raised
    fresh = classifiers(module) if new_classifier else ()
    if new_classifier and not fresh and not isinstance(module, MaskedAutoencoder):
        raise UserError(
            f"MODEL.NEW_CLASSIFIER: {type(module).__name__}'s classifier is unknown; get_classifier must return it."
        )
    if found.file.suffix == ".npz":
        own = {key: value.clone() for key, value in module.state_dict().items() if is_inside(key, fresh)}
        loaded = _load_npz(module, found.file, name)
        module.load_state_dict(own, strict=False)
        if fresh:
            loaded.changes.append(f"{', '.join(fresh)} {start}")
    else:
        new = {prefix: f"{prefix} {start} (MODEL.NEW_CLASSIFIER)" for prefix in fresh}
        loaded = _load_tensors(module, found, name, new)
    words = [f"{loaded.words} from {found.file}"] + loaded.changes
    sentence = f"Pretrained weights: {'; '.join(words)}"
    if complete and (loaded.is_partly_new or fresh):
        raise UserError(
            f"{sentence}. -eval trains nothing, so its accuracy would be that of an untrained classifier: "
            "set MODEL.NUM_CLASSES to the number of classes in the file, evaluate on data with these classes, and "
            "leave out MODEL.NEW_CLASSIFIER; or train first, without -eval."
        )
    if new_classifier == "zero":
        _zero_classifiers(module)
    return f"{sentence} ({found.description})" if found.description else sentence


def _zero_classifiers(model: nn.Module) -> None:
    for head in map(model.get_submodule, classifiers(model)):
        layers = [layer for layer in head.modules() if isinstance(layer, nn.Linear | nn.Conv2d)]
        for layer in layers:
            # With zeros before the last one, nothing would learn. CrossViT averages several that are as wide.
            if len(layer.weight) == len(layers[-1].weight):
                for weight in layer.parameters():
                    nn.init.zeros_(weight)


def _load_tensors(module: nn.Module, found: WeightFiles, name: str, new: dict[str, str]) -> Loaded:
    """Load weights by the names of tensors, all or none. `new`: parts of the model to keep, with what the log says."""
    weights = _read(found.files)
    target = module.state_dict()
    is_masking = isinstance(module, MaskedAutoencoder)
    unused = "head" if is_masking else DECODER  # a masked autoencoder has no classifier, others seldom a decoder
    given = {key: value for key, value in weights.items() if not key.startswith(f"{unused}.") or key in target}
    changes: list[str] = []
    if len(given) < len(weights):
        changes.append(f"{len(weights) - len(given)} tensors of its {unused} left out")
    before = {key: tuple(value.shape) for key, value in given.items()}
    weights = _adapt_channels(module, _filter(module, given, found.file, name))
    for key, value in weights.items():
        after = tuple(value.shape)
        if before.get(key, after) != after:
            changes.append(f"{key} resized from {_shape(before[key])} to {_shape(after)}")
    if is_masking and not any(key.startswith(DECODER) for key in weights):
        new[DECODER] = f"the {DECODER} stays {FRESH}"
    heads = names_in_cfg(module, "classifier") or classifiers(module)
    missing, replacements = _replace_classifier(heads, weights, target, found.label_offset, new)
    lines = _mismatches(weights, before, target, missing)
    if lines:
        only_positions = all(re.match(r" +\S*pos_embed\S*: ", line) for line in lines[1:])
        why = OTHER_SIZE if only_positions else ""
        if not heads:
            lines.append(
                f"  {type(module).__name__}'s classifier is unknown; if get_classifier returns it, one with other "
                "classes is new, or with MODEL.NEW_CLASSIFIER any"
            )
        title = f"{_misfit(module, given, found.file, name, why)}:"
        raise UserError("\n".join([title] + lines))
    module.load_state_dict(weights, strict=False)
    changes += replacements
    changes += new.values()
    return Loaded(f"{len(weights)} of {len(target)} tensors", changes, is_partly_new=bool(replacements or new))


def _read(files: Sequence[Path]) -> Weights:
    """Tensors of a file or its shards, without the wrappings of DDP, torch.compile and training scripts."""
    file = files[0]
    for one in files:
        seal = seal_of(one)
        if isinstance(seal, dict) and sha256_of(one) != seal.get("sha256"):
            raise UserError(f"Pretrained weights {one}: damaged, its contents are not what was written.")
    if file.suffix == PADDLE:
        return _read_paddle(file)
    # timm loads the EMA of a checkpoint that has one. Only keys are read; errors are left to the loading.
    with contextlib.suppress(Exception), torch.serialization.safe_globals([argparse.Namespace]):
        keys_of_weights(torch.load(file, map_location="cpu", weights_only=True, mmap=True), file)
    try:
        whole: Any = load_state_dict(str(file), weights_only=True) if len(files) == 1 else JoinedShards(list(files))
        weights = dict(whole)
        weights.pop("n_averaged", None)  # a counter of torch's AveragedModel, the EMA of torchvision's checkpoints
    except Exception as error:  # a damaged pickle can raise anything
        if "weights_only" in str(error):
            raise UserError(
                f"Pretrained weights {file}: the file holds more than tensors, and loading it could run malicious "
                "code. Save the model's state_dict() alone."
            ) from None
        raise UserError(unreadable(file, error)) from None
    if not weights or not all(isinstance(value, Tensor) for value in weights.values()):
        keys = ", ".join(map(str, list(weights)[:MOST_NAMED])) or "nothing"
        raise UserError(f"Pretrained weights {file}: no tensors under model, state_dict or model_ema; it holds {keys}.")
    if any(is_adapter(key) for key in weights):
        return _merged(weights, file)
    return weights


def _read_paddle(file: Path) -> Weights:
    arrays = read_pdparams(file)
    converted = convert(arrays, file)
    weights = dict(converted.tensors)
    for name in converted.unused:  # included, so that `_mismatches` reports them with all others
        if not name.startswith(OF_A_CLASSIFIER):
            weights[name] = torch.from_numpy(arrays[name].copy())
    return weights


def _merged(weights: Weights, file: Path) -> Weights:
    """The whole weights of a run that trained adapters (MODEL.LORA) alone."""
    meta = unchecked_meta(file.parent)
    if meta.get(LORA) is None:
        raise UserError(
            f"Pretrained weights {file}: the file holds adapters, and the {META} beside it, which names the frozen "
            "weights they belong to, is missing. Name the run's folder."
        )
    check_fields(Adapters, meta[LORA], file.with_name(META))
    base = verified_base(file.parent, meta)
    log.info("%s: the adapters (MODEL.LORA) are merged into the frozen weights of %s.", file, base)
    return dict(Merged(load_state_dict(str(base)) | weights, meta[LORA]["factor"]))


def _filter(module: nn.Module, weights: Weights, file: Path, name: str) -> Weights:
    """timm's conversion for this kind of model: other layouts, resized position embeddings and patches."""
    convert = _timms_filter(module)
    if convert is None:
        return dict(weights)
    parameters = inspect.signature(convert).parameters
    # DeiT III's first files name their layer scale gamma_1; for other files the option has no effect.
    options = {"adapt_layer_scale": True} if "adapt_layer_scale" in parameters else {}
    trained = size_of_run(file)
    if trained is not None:  # where timm looks it up: the weights' grid of patches may be no square
        vars(module)["pretrained_model_args"] = {"img_size": trained}
    try:
        found = dict(convert(weights, module, **options) if len(parameters) > 1 else convert(weights))
    except MISFITS as error:
        reason = str(error) or type(error).__name__
        raise UserError(f"{_misfit(module, weights, file, name)}: {reason}.") from None
    if isinstance(trained, tuple) and trained == _image_size(module):  # timm can take a table for that of a square
        target = module.state_dict()
        for key in found.keys() & weights:
            if weights[key].shape == target[key].shape:
                found[key] = weights[key]
    if _left_behind(module, weights, found, trained):
        raise UserError(f"{_misfit(module, weights, file, name, OTHER_SIZE)}.")
    return found


def _timms_filter(module: nn.Module) -> Callable[..., Any] | None:
    """The function in the module of a model's class that converts weights; ours may extend timm's class."""
    for kind in type(module).__mro__:
        package = importlib.import_module(kind.__module__)
        for name in ("checkpoint_filter_fn", "_filter_fn"):
            if hasattr(package, name):
                return getattr(package, name)
    return None


def _left_behind(module: nn.Module, given: Weights, weights: Weights, trained: ImageSize | None) -> bool:
    """Whether timm kept weights that depend on the grid of patches, although the model has another one.

    Most of its models compare the number of patches alone, and 14 x 14 are as many as 7 x 28.
    """
    own = _image_size(module)
    if own is None:
        return False
    of_timm = pretrained_cfg(module).get("input_size", (0, *own))[1:]
    high, wide = sides(trained or of_timm)
    if (high, wide) == own or high * wide != math.prod(own):
        return False
    of_grid = [key for key in given if re.search(BY_PATCH, key) and given[key].ndim in (2, 3)]
    return isinstance(module, MlpMixer) or any(given[key] is weights.get(key) for key in of_grid)


def _image_size(module: nn.Module) -> tuple[int, int] | None:
    """Of the images that a model with patches is built for; None if any size will do."""
    embedding: Any = getattr(module, "patch_embed", None) or getattr(module, "stem", None)
    return getattr(embedding, "img_size", None)


def _adapt_channels(module: nn.Module, weights: Weights) -> Weights:
    """Adapt the first convolution to another number of image channels, as timm does."""
    for key in (f"{prefix}.weight" for prefix in names_in_cfg(module, "first_conv")):
        own = module.state_dict().get(key)
        given = weights.get(key)
        if own is None or given is None or own.ndim != 4 or given.ndim != 4 or own.shape[1] == given.shape[1]:
            continue
        try:
            weights[key] = adapt_input_conv(own.shape[1], given, base_chans=given.shape[1])
        except (AssertionError, NotImplementedError):
            continue  # `_mismatches` reports it
    return weights


def _replace_classifier(
    heads: tuple[str, ...], weights: Weights, target: Weights, label_offset: int, unwanted: Collection[str]
) -> tuple[set[str], list[str]]:
    """Drop a classifier that is unwanted or has another number of classes.

    Returns the names of tensors that stay freshly initialised, and phrases for the log.
    """
    fresh = {key for key in target if is_inside(key, unwanted)}
    for key in list(weights):
        if is_inside(key, unwanted):
            del weights[key]
    changes: list[str] = []
    for prefix in heads:
        keys = [key for key in (f"{prefix}.weight", f"{prefix}.bias") if key in target]
        if fresh.issuperset(keys):
            continue
        given = weights.get(keys[0])
        own = target[keys[0]]
        if given is None:
            fresh.update(keys)
            changes.append(f"the file has no {prefix}; the model's {prefix} stays {FRESH}")
            continue
        if label_offset and given.shape[0] == own.shape[0] + label_offset:
            for key in keys:
                if key in weights:
                    weights[key] = weights[key][label_offset:]
        elif given.shape[0] != own.shape[0]:
            for key in keys:
                weights.pop(key, None)
            fresh.update(keys)
            changes.append(REPLACED.format(prefix, given.shape[0], own.shape[0]))
    return fresh, changes


def _misfit(module: nn.Module, weights: Weights, file: Path, name: str, why: str = "") -> str:
    """Beginning of an error: sizes that differ, and the words of a command line that give the model those of a run."""
    own = sizes_of(module)
    own["POOL"] = vars(module).get(OWN_POOL)
    own["INIT_VALUES"] = vars(module).get(OWN_SCALE)
    run = None
    theirs: dict[str, Any] = {}
    with contextlib.suppress(UserError, LookupError, ValueError):  # no ViT or Swin, or names of another program
        run = model_of_run(file)
        if run:
            theirs = sizes_in(run)
        else:
            family = "swin" if any(key.startswith("layers.") for key in weights) else "vit"
            theirs = sizes_of_weights(Converted(family, tensors=weights))
    differing: dict[str, Any] = {}
    for key, value in theirs.items():
        is_known = run is not None or value is not None
        if key not in RESIZED and is_known and value != own.get(key, value):
            differing[key] = value
    if not why:
        phrases = [
            f"{SIZE_WORDS.get(key, key)} {one_line(value)} in the weights, {one_line(own[key])} in the recipe"
            for key, value in differing.items()
        ]
        why = "; ".join(phrases) or "they may be of another model, which -model names (-list_models prints timm's)"
    text = f"Pretrained weights {file} do not fit {name}: {why}"
    if run is None:
        return text
    if own.keys() != theirs.keys():  # a model of another kind
        differing = {"TYPE": run.TYPE, "NAME": run.NAME} | given_sizes(run)
    words = " ".join(f"MODEL.{key}={shlex.quote(one_line(value))}" for key, value in differing.items())
    return f"{text}. For the model of the run, add {words} to the command" if words else text


def _mismatches(weights: Weights, before: dict[str, tuple[int, ...]], target: Weights, fresh: set[str]) -> list[str]:
    """Lines about tensors that differ in shape, are missing, or are unknown to the model.

    `before`: the shapes in the file, before anything was resized.
    """
    differing = []
    missing = []
    for key, own in target.items():
        if key not in weights:
            if key not in fresh and not key.endswith(COUNTER):
                missing.append(key)
        elif weights[key].shape != own.shape:
            given = before.get(key, tuple(weights[key].shape))
            differing.append(f"{key}: {_shape(given)} in the file, {_shape(tuple(own.shape))} in the model")
    unknown = [key for key in weights if key not in target]
    lines: list[str] = []
    for title, tensors in (("differ", differing), ("missing in the file", missing), ("unknown to the model", unknown)):
        if tensors:
            lines.append(f"  {title} ({len(tensors)}):")
            lines += [f"    {line}" for line in tensors[:MOST_NAMED]]
        if len(tensors) > MOST_NAMED:
            lines.append(f"    ... and {len(tensors) - MOST_NAMED} more")
    return lines


def _load_npz(module: Any, file: Path, name: str) -> Loaded:
    """Load Google's ViT weights (AugReg and earlier) with timm's reader."""
    if not hasattr(module, "load_pretrained"):
        raise UserError(f"Pretrained weights {file}: .npz files are for ViTs; {name} is a {type(module).__name__}.")
    position = None
    head = None
    try:
        with np.load(file, allow_pickle=False) as archive:
            names = archive.files
            for key in names:
                if key.endswith("pos_embedding"):
                    position = archive[key].shape
                elif key.endswith("head/bias"):
                    head = archive[key].shape
    except Exception as error:  # numpy and zlib each raise their own
        raise UserError(unreadable(file, error)) from None
    numbers = [re.search(r"encoderblock_(\d+)/", key) for key in names]
    blocks = {int(found[1]) for found in numbers if found}
    if blocks and len(blocks) != len(module.blocks):  # timm's reader would ignore surplus blocks silently
        raise UserError(
            f"Pretrained weights {file} do not fit {name}: {len(blocks)} blocks in the file, "
            f"{len(module.blocks)} in the model (MODEL.DEPTH)."
        )
    changes: list[str] = []
    embedding = getattr(module, "pos_embed", None)
    own = tuple(embedding.shape) if isinstance(embedding, Tensor) else None
    if position and own and position != own:
        changes.append(f"pos_embed resized from {_shape(position)} to {_shape(own)}")
    has_new_head = head is None or head[-1] != module.num_classes
    if head is None:
        changes.append(f"the file has no head; the model's head stays {FRESH}")
    elif has_new_head:
        changes.append(REPLACED.format("head", head[-1], module.num_classes))
    try:
        module.load_pretrained(str(file))
        grid = module.patch_embed.grid_size
        if position and position == own and grid[0] != grid[1]:
            # timm's reader resizes only to another number of patches. Those of such files form a square.
            prefix = position[1] - math.prod(grid)
            module.pos_embed.data = resample_abs_pos_embed(module.pos_embed.data, list(grid), num_prefix_tokens=prefix)
            changes.append(f"pos_embed resized to {in_pixels(grid)} patches")
    except MISFITS as error:
        raise UserError(f"Pretrained weights {file} do not fit {name}: {error}.") from None
    return Loaded(f"{len(names)} arrays", changes, is_partly_new=has_new_head)


def _shape(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape)) or "scalar"
