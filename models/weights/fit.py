"""Loading pretrained weights into a built model: timm's filters adapt them, then all are loaded or none."""

import argparse
import contextlib
import importlib
import inspect
import math
import re
import shlex
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

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

Weights = dict[str, Tensor]


def load_pretrained(
    module: nn.Module, source: str, name: str, new_classifier: bool | str = False, complete: bool = False
) -> str:
    """Load weights from `source` into the model called `name`; returns a sentence for the log about what was loaded.

    `new_classifier`: keep the model's own classifier; as MODEL.NEW_CLASSIFIER says. `complete`: refuse weights that
    leave a classifier freshly initialised, as evaluation needs.
    """
    start = f"left as {FRESH}" if complete else STARTS.get(str(new_classifier), f"left as {FRESH}")
    found, fresh = locate(source), classifiers(module) if new_classifier else ()
    assert found is not None  # downloaded, or an error was raised
    if new_classifier and not fresh and not isinstance(module, MaskedAutoencoder):
        raise UserError(
            f"MODEL.NEW_CLASSIFIER: {type(module).__name__}'s classifier is unknown; get_classifier must return it."
        )
    if found.file.suffix == ".npz":
        own = {key: value.clone() for key, value in module.state_dict().items() if is_inside(key, fresh)}
        loaded, changes, untrained = _load_npz(module, found.file, name)
        module.load_state_dict(own, strict=False)
        changes += [f"{', '.join(fresh)} {start}"] if fresh else []
    else:
        new = {prefix: f"{prefix} {start} (MODEL.NEW_CLASSIFIER)" for prefix in fresh}
        loaded, changes, untrained = _load_tensors(module, found, name, new)
    sentence = f"Pretrained weights: {'; '.join([f'{loaded} from {found.file}', *changes])}"
    if complete and (untrained or fresh):
        raise UserError(
            f"{sentence}. -eval trains nothing, so its accuracy would be that of an untrained classifier: "
            "set MODEL.NUM_CLASSES to the number of classes in the file, evaluate on data with these classes, and "
            "leave out MODEL.NEW_CLASSIFIER; or train first, without -eval."
        )
    return f"{sentence} ({found.description})" if found.description else sentence


Result = tuple[str, list[str], bool]
"""What was loaded, what was changed for it, and whether parts of the model stay freshly initialised"""


def _load_tensors(module: nn.Module, found: WeightFiles, name: str, new: dict[str, str]) -> Result:
    """Load weights by the names of tensors, all or none. `new`: parts of the model to keep, with what the log says."""
    weights, target, masking = _read(found.files), module.state_dict(), isinstance(module, MaskedAutoencoder)
    unused = "head" if masking else DECODER  # a masked autoencoder has no classifier, others seldom a decoder
    given = {key: value for key, value in weights.items() if not key.startswith(f"{unused}.") or key in target}
    changes = [f"{len(weights) - len(given)} tensors of its {unused} left out"] if len(given) < len(weights) else []
    before = {key: tuple(value.shape) for key, value in given.items()}
    weights = _adapt_channels(module, _filter(module, given, found.file, name))
    changes += [
        f"{key} resized from {_shape(before[key])} to {_shape(tuple(value.shape))}"
        for key, value in weights.items()
        if before.get(key, value.shape) != value.shape
    ]
    if masking and not any(key.startswith(DECODER) for key in weights):
        new |= {DECODER: f"the {DECODER} stays {FRESH}"}
    heads = names_in_cfg(module, "classifier") or classifiers(module)
    missing, replacements = _replace_classifier(heads, weights, target, found.label_offset, new)
    if lines := _mismatches(weights, before, target, missing):
        fixed = all(re.match(r" +\S*pos_embed\S*: ", line) for line in lines[1:])  # only these differ
        if not heads:
            lines.append(
                f"  {type(module).__name__}'s classifier is unknown; if get_classifier returns it, one with other "
                "classes is new, or with MODEL.NEW_CLASSIFIER any"
            )
        raise UserError("\n".join([f"{_misfit(module, given, found.file, name, OTHER_SIZE * fixed)}:", *lines]))
    module.load_state_dict(weights, strict=False)
    changes += [*replacements, *new.values()]
    return f"{len(weights)} of {len(target)} tensors", changes, bool(replacements or new)


def _read(files: Sequence[Path]) -> Weights:
    """Tensors of a file or its shards, without the wrappings of DDP, torch.compile and training scripts."""
    file = files[0]
    for one in files:
        if isinstance(seal := seal_of(one), dict) and sha256_of(one) != seal.get("sha256"):
            raise UserError(f"Pretrained weights {one}: damaged, its contents are not what was written.")
    if file.suffix == PADDLE:
        converted = convert(arrays := read_pdparams(file), file)
        # Those that timm's model does not have are included, so that `_mismatches` reports them with all others.
        left_over = [name for name in converted.unused if not name.startswith(OF_A_CLASSIFIER)]
        return converted.tensors | {name: torch.from_numpy(arrays[name].copy()) for name in left_over}
    # timm loads the EMA of a checkpoint that has one. Only keys are read; errors are left to the loading.
    with contextlib.suppress(Exception), torch.serialization.safe_globals([argparse.Namespace]):
        keys_of_weights(torch.load(file, map_location="cpu", weights_only=True, mmap=True), file)
    try:
        whole: Any = load_state_dict(str(file), weights_only=True) if len(files) == 1 else JoinedShards([*files])
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
    if not any(map(is_adapter, weights)):
        return weights
    meta = unchecked_meta(file.parent)  # of a run with adapters (MODEL.LORA)
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
    packages = [importlib.import_module(kind.__module__) for kind in type(module).__mro__]  # ours may extend timm's
    names = ("checkpoint_filter_fn", "_filter_fn")
    convert = next((getattr(one, own) for one in packages for own in names if hasattr(one, own)), None)
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
    except (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise UserError(f"{_misfit(module, weights, file, name)}: {error or type(error).__name__}.") from None
    if isinstance(trained, tuple) and trained == _image_size(module):  # timm can take a table for that of a square
        target = module.state_dict()
        found |= {key: weights[key] for key in found.keys() & weights if weights[key].shape == target[key].shape}
    if _left_behind(module, weights, found, trained):
        raise UserError(f"{_misfit(module, weights, file, name, OTHER_SIZE)}.")
    return found


def _left_behind(module: nn.Module, given: Weights, weights: Weights, trained: ImageSize | None) -> bool:
    """Whether timm kept weights that depend on the grid of patches, although the model has another one.

    Most of its models compare the number of patches alone, and 14 x 14 are as many as 7 x 28.
    """
    if (own := _image_size(module)) is None:
        return False
    high, wide = sides(trained or pretrained_cfg(module).get("input_size", (0, *own))[1:])
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
    for key in [key for key in weights if is_inside(key, unwanted)]:
        del weights[key]
    changes: list[str] = []
    for prefix in heads:
        keys = [key for key in (f"{prefix}.weight", f"{prefix}.bias") if key in target]
        if fresh.issuperset(keys):
            continue
        given, own = weights.get(keys[0]), target[keys[0]]
        if given is None:
            fresh.update(keys)
            changes.append(f"the file has no {prefix}; the model's {prefix} stays {FRESH}")
            continue
        if label_offset and given.shape[0] == own.shape[0] + label_offset:
            weights.update({key: weights[key][label_offset:] for key in weights.keys() & keys})
        elif given.shape[0] != own.shape[0]:
            for key in keys:
                weights.pop(key, None)
            fresh.update(keys)
            changes.append(REPLACED.format(prefix, given.shape[0], own.shape[0]))
    return fresh, changes


def _misfit(module: nn.Module, weights: Weights, file: Path, name: str, why: str = "") -> str:
    """Beginning of an error: sizes that differ, and the words of a command line that give the model those of a run."""
    run, theirs, noted = None, dict[str, Any](), vars(module)
    own = {**sizes_of(module), "POOL": noted.get(OWN_POOL), "INIT_VALUES": noted.get(OWN_SCALE)}
    with contextlib.suppress(UserError, LookupError, ValueError):  # no ViT or Swin, or names of another program
        run, kind = model_of_run(file), "swin" if any(key.startswith("layers.") for key in weights) else "vit"
        theirs = sizes_in(run) if run else sizes_of_weights(Converted(kind, tensors=weights))
    differing = {
        key: value
        for key, value in theirs.items()
        if key not in RESIZED and value != own.get(key, value) and (run or value is not None)
    }
    words = "; ".join(
        f"{SIZE_WORDS.get(key, key)} {one_line(value)} in the weights, {one_line(own[key])} in the recipe"
        for key, value in differing.items()
    )
    words = why or words or "they may be of another model, which -model names (-list_models prints timm's)"
    text = f"Pretrained weights {file} do not fit {name}: {words}"
    if run is None:
        return text
    if own.keys() != theirs.keys():  # a model of another kind
        differing = {"TYPE": run.TYPE, "NAME": run.NAME, **given_sizes(run)}
    words = " ".join(f"MODEL.{key}={shlex.quote(one_line(value))}" for key, value in differing.items())
    return f"{text}. For the model of the run, add {words} to the command" if words else text


def _mismatches(weights: Weights, before: dict[str, tuple[int, ...]], target: Weights, fresh: set[str]) -> list[str]:
    """Lines about tensors that differ in shape, are missing, or are unknown to the model.

    `before`: the shapes in the file, before anything was resized.
    """
    differing = [
        f"{key}: {_shape(before.get(key, tuple(weights[key].shape)))} in the file, {_shape(tuple(own.shape))} in the "
        "model"
        for key, own in target.items()
        if key in weights and weights[key].shape != own.shape
    ]
    missing = [key for key in target if key not in weights and key not in fresh and not key.endswith(COUNTER)]
    unknown = [key for key in weights if key not in target]
    lines: list[str] = []
    for title, tensors in (("differ", differing), ("missing in the file", missing), ("unknown to the model", unknown)):
        if tensors:
            lines += [f"  {title} ({len(tensors)}):", *(f"    {line}" for line in tensors[:MOST_NAMED])]
        if len(tensors) > MOST_NAMED:
            lines.append(f"    ... and {len(tensors) - MOST_NAMED} more")
    return lines


def _load_npz(module: Any, file: Path, name: str) -> Result:
    """Load Google's ViT weights (AugReg and earlier) with timm's reader."""
    if not hasattr(module, "load_pretrained"):
        raise UserError(f"Pretrained weights {file}: .npz files are for ViTs; {name} is a {type(module).__name__}.")
    try:
        with np.load(file, allow_pickle=False) as archive:
            names = archive.files
            ends = ("pos_embedding", "head/bias")
            shapes = {end: archive[key].shape for key in names for end in ends if key.endswith(end)}
    except Exception as error:  # numpy and zlib each raise their own
        raise UserError(unreadable(file, error)) from None
    blocks = {int(found.group(1)) for key in names if (found := re.search(r"encoderblock_(\d+)/", key))}
    if blocks and len(blocks) != len(module.blocks):  # timm's reader would ignore surplus blocks silently
        raise UserError(
            f"Pretrained weights {file} do not fit {name}: {len(blocks)} blocks in the file, "
            f"{len(module.blocks)} in the model (MODEL.DEPTH)."
        )
    changes = []
    position, head = map(shapes.get, ends)
    own = tuple(module.pos_embed.shape) if isinstance(getattr(module, "pos_embed", None), Tensor) else None
    if position and own and position != own:
        changes.append(f"pos_embed resized from {_shape(position)} to {_shape(own)}")
    untrained = head is None or head[-1] != module.num_classes
    if head is None:
        changes.append(f"the file has no head; the model's head stays {FRESH}")
    elif untrained:
        changes.append(REPLACED.format("head", head[-1], module.num_classes))
    try:
        module.load_pretrained(str(file))
        grid = module.patch_embed.grid_size
        if position and position == own and grid[0] != grid[1]:
            # timm's reader resizes only to another number of patches. Those of such files form a square.
            prefix = position[1] - math.prod(grid)
            module.pos_embed.data = resample_abs_pos_embed(module.pos_embed.data, [*grid], num_prefix_tokens=prefix)
            changes.append(f"pos_embed resized to {in_pixels(grid)} patches")
    except (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise UserError(f"Pretrained weights {file} do not fit {name}: {error}.") from None
    return f"{len(names)} arrays", changes, untrained


def _shape(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape)) or "scalar"
