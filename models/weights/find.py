"""Locate pretrained weights: a file, a folder of a run, or timm's name for weights on the Hugging Face hub."""

import os
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import huggingface_hub
import timm
from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError
from safetensors import SafetensorError, safe_open

from models.build import is_timm_name, timm_weights
from models.refusals import similar_models
from utils.config.keys import nested, settings
from utils.config.model import ModelConfig
from utils.errors import UserError, nearest
from vitamp.checkpoints import CHECKPOINTS, checkpoint_of, checkpoints_in, files_of
from vitamp.files import NotRegular, only_regular
from vitamp.meta import Input, check_fields, unchecked_meta
from vitamp.metrics import BETTER, PLAIN, SETS
from vitamp.sizes import ImageSize, size_of
from vitamp.weights import choose_weights, read_header

TORCH_ENDINGS = (".pth", ".pt", ".bin", ".pth.tar")
PADDLE = ".pdparams"
ENDINGS = (".safetensors", *TORCH_ENDINGS, ".npz", PADDLE)
HUB_FILES = (PLAIN.file, "pytorch_model.bin")
PROBE_SECONDS = 4.0
"""Time limit for the hub's answer"""
MOST_TENSORS = 50_000


@dataclass(frozen=True)
class WeightFiles:
    """A file of weights on this machine, or its shards in order."""

    files: tuple[Path, ...]
    label_offset: int = 0
    """Leading classes of its classifier that are not in the data set, such as a background class"""
    description: str = ""
    """For a run or checkpoint: which weights, and their validation metrics"""

    @property
    def file(self) -> Path:
        return self.files[0]


def locate(source: str, download: bool = True) -> WeightFiles | None:
    """Find weights by a path or by timm's name, and download them if they are only on the hub. UserError without them.

    With `download` false, weights that the hub has are not downloaded, and the result is None.
    """
    return local_weights(source) or _on_hub(source, download)


def weights_of_name(name: str, source: str) -> str | None:
    """Correct a PRETRAINED `source` that names timm's weights of another model than `name`: name weights of this model.

    They are called MODEL.TAG, as in vit_base_patch16_224.augreg_in21k. None if `source` names weights of this model, or
    if one of the two names is not timm's.
    """
    if not is_timm_name(name) or not is_timm_name(source):
        return None
    if name.partition(".")[0] == source.partition(".")[0]:
        return None
    if "." in name:  # the name has a tag
        return name
    default_tag = getattr(timm_weights(name), "tag", None)
    return f"{name}.{default_tag}" if default_tag else name


def _saved(file: Path, field: str) -> dict[str, Any]:
    """Read a field of the meta.json beside weights, or of their header; empty without it.

    Another program may have written it, so its contents need checks.
    """
    saved = (unchecked_meta(file.parent) or read_header(file)).get(field)
    return saved if isinstance(saved, dict) else {}


def model_of_run(file: Path) -> ModelConfig | None:
    """Return the MODEL settings of the run that saved these weights; None if nothing beside or inside them says it."""
    saved = _saved(file, "settings")
    model_settings = {key: value for key, value in saved.items() if key.startswith("MODEL.") and key in settings()}
    return ModelConfig.model_validate(nested(model_settings)["MODEL"]) if model_settings else None


def size_of_run(file: Path) -> ImageSize | None:
    """Return the size of the images that these weights were trained on; None if nothing beside or inside them says it.

    UserError if the saved value is no valid image size.
    """
    size = _saved(file, "input").get("image_size")
    if size is None:
        return None
    check_fields(Input, {"image_size": size}, file)
    return size_of(size)


def check_file(path: Path) -> None:
    """Raise UserError unless a file's extension, its first bytes and the directory inside it are those of weights.

    Tensors are not read.
    """
    if not path.name.endswith(ENDINGS):
        raise UserError(f"Pretrained weights {path}: unknown kind of file; known extensions: {', '.join(ENDINGS)}.")
    try:
        with open(path, "rb", opener=only_regular) as file:
            start = file.read(64)
        if start.startswith(b"version https://git-lfs"):
            raise UserError(
                f"Pretrained weights {path}: this is a Git LFS pointer, not the weights; run `git lfs pull`."
            )
        if path.name.endswith(".safetensors"):
            with safe_open(str(path), framework="pt"):  # raises an error if the header is damaged
                return
        is_zip = start.startswith(b"PK")  # torch's current format and .npz
        is_pickle = start.startswith(b"\x80")  # torch's older format and Paddle's
        must_be_zip = path.name.endswith(".npz")
        if is_zip:
            with zipfile.ZipFile(path) as archive:
                entries = len(archive.filelist)
            if entries > MOST_TENSORS:  # torch would take a minute to read them
                raise UserError(f"Pretrained weights {path}: {entries:,} entries, more than any model has tensors.")
        elif must_be_zip or not is_pickle:
            raise UserError(unreadable(path, "wrong first bytes"))
    except (PermissionError, NotRegular) as error:
        raise UserError(f"Pretrained weights {path}: {error.strerror}.") from None
    except (SafetensorError, zipfile.BadZipFile, OSError) as error:
        raise UserError(unreadable(path, error)) from None


def unreadable(path: Path, reason: object) -> str:
    """Say that a file of weights is damaged, for an error."""
    return f"Pretrained weights {path}: the file is damaged, or its extension does not match its format ({reason})."


def _checked(*files: Path, description: str = "") -> WeightFiles:
    for file in files:
        check_file(file)
    return WeightFiles(files, description=description)


def local_weights(source: str) -> WeightFiles | None:
    """Find and check the weights at a path; None if `source` is one of timm's names. UserError if it is neither.

    The path may be a file, or a folder such as that of a run. A path that exists takes precedence over timm's name.
    """
    path = Path(source).expanduser()
    if path.is_dir():
        return _in_folder(path)
    if path.exists():
        return _checked(path)
    if is_timm_name(source):
        return None
    paddle_file = path.with_name(path.name + PADDLE)
    if paddle_file.exists():  # PaddleViT's command lines omit the extension
        return _checked(paddle_file)

    # There are no such weights. The error suggests what may have been meant.
    for ending in ENDINGS:
        candidate = path.with_name(path.name + ending)
        if candidate.exists():
            raise UserError(f"Pretrained weights {path}: no such file, but there is {candidate.name}.")
    is_bare_name = path.name == source and not path.name.endswith(ENDINGS)
    if is_bare_name:  # neither folder nor extension, so a name of timm's may have been meant
        suggestion = similar_models(source, timm.list_pretrained())
        raise UserError(f"Pretrained weights '{source}': not a file or folder, and not a timm model.{suggestion}")
    folder = path.absolute().parent
    if not folder.is_dir():
        raise UserError(f"Pretrained weights {path}: no such file, because there is no folder {folder}.")
    raise UserError(f"Pretrained weights {path}: no such file.{nearest(path.name, sorted(os.listdir(folder)))}")


def _in_folder(path: Path) -> WeightFiles:
    """Find and check the weights in a folder: of a run, whose best checkpoint is used, of a checkpoint, or of timm.

    timm saves such a folder for the hub. UserError if the folder has no weights.
    """
    folder = path
    if (path / CHECKPOINTS).is_dir() or checkpoints_in(path):
        folder, _ = checkpoint_of(path)
    file_names = [entry.name for entry in folder.iterdir() if entry.is_file()]
    available_sets = [weight_set for weight_set in SETS if files_of(weight_set.file, file_names)]
    if available_sets:
        # The meta.json says which set validated better. It may be missing: weights alone will do.
        meta = unchecked_meta(folder)
        weight_set, words = choose_weights(meta, available_sets, wanted=BETTER)
        files = [folder / name for name in files_of(weight_set.file, file_names)]
        return _checked(*files, description=f"{folder.name}, {words}" if meta else "")
    _, timms_file = HUB_FILES  # the first one is among the files of SETS
    if timms_file in file_names:  # timm saved it for the hub
        return _checked(folder / timms_file)
    raise UserError(
        f"Pretrained weights {folder}: the folder has no {' or '.join(HUB_FILES)}, and no {CHECKPOINTS}/ of a run."
    )


def _on_hub(name: str, download: bool) -> WeightFiles | None:
    """Find timm's weights of this name in the hub's cache, or download them. UserError if that is not possible.

    With `download` false, the hub is only asked whether it has weights that are not in the cache, and the result for
    these is None.
    """
    config = timm_weights(name)
    if config is None or not config.has_weights:
        similar_names = timm.list_pretrained(f"{name.partition('.')[0]}*")
        suggestion = f" Similar names with weights: {', '.join(similar_names[:5])}." if similar_names else ""
        raise UserError(f"MODEL.PRETRAINED '{name}': timm has this architecture but no weights for it.{suggestion}")
    if not config.hf_hub_id:  # a few of timm's weights
        raise UserError(
            f"MODEL.PRETRAINED '{name}': these weights are not on the hub. Download {config.url}, and name the file."
        )
    repo, _, tag = config.hf_hub_id.partition("@")
    revision = tag or None
    files = (config.hf_hub_filename,) if config.hf_hub_filename else HUB_FILES
    label_offset = config.label_offset or 0

    # Weights in the cache need no network.
    for file in files:
        cached = huggingface_hub.try_to_load_from_cache(repo, file, revision=revision)
        if isinstance(cached, str):
            return WeightFiles((Path(cached),), label_offset)

    # Other weights are asked for at the hub, which may have the file under either name.
    hub = huggingface_hub.constants
    for file in files:
        url = huggingface_hub.hf_hub_url(repo, file, revision=revision)
        try:
            huggingface_hub.get_hf_file_metadata(url, timeout=PROBE_SECONDS)
            if not download:
                return None  # the hub has the file
            fetched = Path(huggingface_hub.hf_hub_download(repo, file, revision=revision))
            return WeightFiles((fetched,), label_offset)
        except EntryNotFoundError:
            continue
        except HfHubHTTPError as error:
            raise UserError(f"MODEL.PRETRAINED '{name}': the hub refused {url} ({error}).") from None
        except Exception as error:  # the hub's client passes on the errors of its HTTP library
            reason = str(error) or type(error).__name__
            where = f"{' or '.join(files)} of {repo} on {hub.ENDPOINT}; cache {hub.HF_HUB_CACHE}"
            raise UserError(
                f"MODEL.PRETRAINED '{name}': the weights are not on this machine and cannot be fetched "
                f"({reason}).\n  looked for: {where}\n"
                f"  what helps: fetch {files[0]} on a machine with internet access, copy it here and set "
                "MODEL.PRETRAINED to its path; or copy that machine's cache here"
            ) from None
    raise UserError(f"MODEL.PRETRAINED '{name}': {repo} has none of {', '.join(files)}.")
