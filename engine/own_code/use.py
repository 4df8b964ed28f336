"""Which files of the user's own code a start executes: those of -use, or, with -trust, the copies in a run's folder."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import datasets
from utils.config import Config
from utils.config.keys import choices, value_of
from utils.errors import UserError, nearest
from utils.log import log
from utils.own.execute import execute, executed, read
from utils.own.registry import KINDS, bind, names_of, registered
from utils.own.trust import allowed
from utils.record.history import NO_METRICS
from utils.record.own_code import FIELD, Noted, copy_of, noted_by_run, noted_of
from utils.record.resumed_run import resumed_run
from utils.record.run_folder import run_folder_of
from utils.record.tasks import METRICS
from utils.record.weight_sets import set_of

IN_TOOLS = ("model", "dataset")
"""What a trained model needs; the others are of training alone."""
IN_VALIDATION = (*IN_TOOLS, "metric")
"""What -eval needs"""


def use_own_code(config: Config, given: bool, trust: bool = False) -> None:
    """For the entry scripts: execute the files of USE, if they are `given` now, else the resumed run's copies."""
    allowed.trust |= trust
    run = resumed_run(config)
    noted = noted_by_run(run) if run is not None else []
    if given:
        _warn_of_changes([Path(name) for name in config.USE], noted)
        for name in config.USE:
            execute(Path(name).expanduser())
        for one in executed.values():
            log.info("Own code: %s", Noted(**one.as_noted()).words())
        _bind(config, tuple(KINDS))
        for line in _unused(config):
            log.info("%s", line)
    else:
        use_of_weights(noted, config, run, IN_VALIDATION if config.EVAL else tuple(KINDS))


def use_of_weights(noted: Sequence[Noted], config: Config, run: Path | None, kinds: Sequence[str] = IN_TOOLS) -> None:
    """Execute what `config` uses of the files that are noted beside weights, as -use and -trust allow."""
    used = _used(config)
    needed = [one for one in noted if any(kind in kinds and name in used for name, kind in one.registers.items())]
    own = {read(path)[1]: path for path in allowed.files}
    strange = [one for one in needed if one.sha256 not in own]
    if strange and not allowed.trust:
        places = [f"  {one.words()}, sha256 {one.sha256}\n    copy: {_place(run, one)}" for one in strange]
        raise UserError(
            "This model uses code of its run, which is not executed without your consent:\n"
            + "\n".join(places)
            + "\nRead it. Then add -trust to execute the copy, or -use FILE with a file of the same sha256."
        )
    for one in needed:
        execute(own[one.sha256] if one.sha256 in own else copy_of(run, one), one.file)
    _bind(config, kinds)


def use_of_meta(meta: Mapping[str, Any], config: Config, place: Path, kinds: Sequence[str] = IN_TOOLS) -> None:
    """For tools: what the weights at `place` need."""
    use_of_weights(noted_of(meta.get(FIELD), place), config, run_folder_of(place), kinds)


def may_execute(meta: Mapping[str, Any], place: Path, names: Collection[str]) -> bool:
    """Whether the command line allows to execute the files that register these names, by what is noted at `place`."""
    own = {read(path)[1] for path in allowed.files}
    needed = [one for one in noted_of(meta.get(FIELD), place) if not one.registers.keys().isdisjoint(names)]
    return allowed.trust or all(one.sha256 in own for one in needed)


def _place(run: Path | None, noted: Noted) -> str:
    try:
        return str(copy_of(run, noted))
    except UserError as error:
        return str(error)


def _used(config: Config) -> set[str]:
    single = {config.TRAIN.LOSS, config.MODEL.NAME.strip(), config.DATA.DATASET}
    return single.union(config.TRAIN.AUGMENT, config.VALIDATE_METRICS)


def _unused(config: Config) -> Iterator[str]:
    """One line for each thing that the files register and that no setting chooses."""
    # A model may also be the teacher, a data set that of the k-NN accuracy.
    used = _used(config) | {config.TRAIN.TEACHER_MODEL, config.TRAIN.KNN.DATASET}
    for name, own in registered.items():
        if name in used or (config.EVAL and own.kind not in IN_VALIDATION):
            continue
        setting = KINDS[own.kind].setting
        others = value_of(config, setting)
        value = ",".join([*others, name]) if isinstance(others, list | tuple) else name
        file = Path(own.file).name
        yield f"{own.kind} {name} of {file} is registered, but not used; {setting}={value} chooses it"


def _warn_of_changes(paths: Sequence[Path], noted: Sequence[Noted]) -> None:
    before = {one.file: one for one in noted}
    for path in paths:
        was = before.get(path.name)
        if was is not None and read(path)[1] != was.sha256:
            log.warning(
                "%s has changed since the run's last start (copy: %s). The run continues with the new file.",
                path,
                f"own_code/{was.copy_name}",
            )


def _bind(config: Config, kinds: Sequence[str]) -> None:
    """Offer what is registered to the rooms that choose by name, and check names and settings."""
    if losses := [name for name in names_of("loss") if name.casefold() in choices("TRAIN.LOSS")]:
        raise UserError(f"-use {registered[losses[0]].file}: TRAIN.LOSS has a loss {losses[0]} already; rename yours.")
    if sets := [name for name in names_of("dataset") if name in datasets.names()]:
        raise UserError(f"-use {registered[sets[0]].file}: there is a data set {sets[0]} already; rename yours.")
    if taken := [name for name in names_of("metric") if _is_taken(name)]:
        raise UserError(f"-use {registered[taken[0]].file}: validation has a metric {taken[0]} already; rename yours.")
    if names_of("model"):
        from models.own import offer_models

        offer_models()
    if "loss" in kinds and config.TRAIN.own_loss:
        _check_name("loss", config.TRAIN.LOSS, choices("TRAIN.LOSS"))
    for name in config.TRAIN.AUGMENT if "augmentation" in kinds else ():
        _check_name("augmentation", name)
    for name in config.VALIDATE_METRICS if "metric" in kinds else ():
        _check_name("metric", name)
    for note in bind(config.USE_SETTINGS, _used(config), all_files=len(kinds) == len(KINDS)):
        log.warning("%s.", note)


def _is_taken(name: str) -> bool:
    """Whether lines of metrics.jsonl have a field of this name already, or one that reads as it."""
    return name in METRICS or name in NO_METRICS or set_of(name)[1] != name


def _check_name(kind: str, name: str, built_in: Sequence[str] = ()) -> None:
    known = [*built_in, *names_of(kind)]
    if name not in known:
        raise UserError(
            f"{KINDS[kind].setting} {name}: there is no {kind} of this name.{nearest(name, known)} "
            f"Known: {', '.join(known) or 'none'}. One of your own needs its file: -use FILE."
        )
