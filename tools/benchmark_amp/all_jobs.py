"""What `all` is asked for: a table and a model each, and the flags and settings that each of them takes."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.benchmark_amp.frame import Found, Table
from tools.benchmark_amp.measure import command_line, kept
from tools.benchmark_amp.settings import MODEL
from tools.benchmark_amp.tables import TABLES
from tools.common.command_line import ToolLine, read_line
from utils.cli import BY_NAME, Flag, pieces
from utils.errors import UserError, nearest
from utils.run_folder import versions

TOOL = "benchmark_amp.py"
ABOUT = """Every table for several models, in one folder; the same call goes on where the time was up.

    python scripts/benchmark_amp.py all -budget_min 9
    python scripts/benchmark_amp.py all -dir output/h200 -models vit_small_patch16_224:512,vit_base_patch16_224:256
    python scripts/benchmark_amp.py all -tables windows,peers -rounds 3 -compile TRAIN.RESIDUAL_DTYPE=autocast

A JSON file and a picture for each table and model, and overview.md with all of them. One after another is measured to
its end; what is whole is not begun again. All other flags and settings go to the tables, each of which takes those of
the tables' flags that it knows: `benchmark_amp.py TABLE -h` tells them. With a table's name before it a flag is for
that table alone: -peers_rounds 7, -scaling_models A,B. A table that fails is told, and the others go on."""
OWN = (
    Flag("dir", "the folder (default output/tables)", "DIR", ("DIR",)),
    Flag("tables", "which, in this order (default windows,modes,scaling,peers; on a CPU fewer)", "A,B", ("TABLES",)),
    Flag(
        "models",
        "models, N being a batch size of its own (default: the one that is set, or ViT S, B and L; on a CPU Ti)",
        "A:N,B",
        ("ALL_MODELS",),
    ),
    Flag("budget_min", "minutes of this call (default 10)", "M", ("BUDGET_MIN",)),
)
ON_GPU = (
    ("windows", "modes", "scaling", "peers"),
    ("vit_small_patch16_224", "vit_base_patch16_224", "vit_large_patch16_224"),
)
ON_CPU = ("windows", "modes", "simplenet"), ("vit_tiny_patch16_224",)


@dataclass(frozen=True)
class Model:
    name: str
    batch: int | None = None

    @property
    def words(self) -> str:
        return self.name if self.batch is None else f"{self.name}, batch {self.batch}"


@dataclass(frozen=True)
class Job:
    """One table of one model."""

    table: Table
    of: str
    """The model, in words; nothing for a table that knows none."""
    words: list[str]
    """Of the command that measures it alone, behind the table's name."""
    file: Path

    @property
    def command(self) -> str:
        return command_line([self.table.name, *self.words])

    @property
    def name(self) -> str:
        return f"{self.table.name}, {self.of}" if self.of else self.table.name

    @property
    def picture(self) -> Path:
        return self.file.with_suffix(".png")

    def line(self) -> ToolLine:
        return read_line(self.words, TOOL, self.table.about, self.table.flags)

    def kept(self) -> Found | None:
        return kept(self.file)


@dataclass(frozen=True)
class Asked:
    jobs: list[Job]
    folder: Path
    seconds: float


def _flags_of(table: Table) -> dict[str, Flag]:
    """By name; but for the model, which comes from -models."""
    return {flag.name: flag for flag in table.flags if flag is not MODEL}


def _alone(table: Table, flag: Flag) -> Flag:
    """The same flag for this table alone."""
    keys = tuple(f"{table.name}_{key}".upper() for key in flag.keys)
    return Flag(f"{table.name}_{flag.name}", flag.about, flag.value, keys)


OWN_NAMES = {flag.name for flag in OWN}
NAMES = dict.fromkeys(name for table in TABLES.values() for name in _flags_of(table) if name not in OWN_NAMES)
SHARED = {name: [table for table in TABLES.values() if name in _flags_of(table)] for name in NAMES}
"""A flag's name -> the tables that know it."""
FOR_ONE = {_alone(table, flag).name: (table, flag) for table in TABLES.values() for flag in _flags_of(table).values()}
"""A flag with a table's name before it -> that table, and its flag."""


def known_flags() -> tuple[Flag, ...]:
    shared = [_flags_of(tables[0])[name] for name, tables in SHARED.items()]
    return (*OWN, *shared, *(_alone(table, flag) for table, flag in FOR_ONE.values()))


def asked_for(argv: list[str]) -> Asked:
    if any(word.startswith("-") and word.lstrip("-") in ("h", "help") for word in argv):
        argv = ["-h"]
    line = read_line(argv, TOOL, ABOUT, OWN if argv == ["-h"] else known_flags())
    seconds = 60 * line.above_zero("BUDGET_MIN", 10)
    tables, models = _tables(line), _models(line)
    if tables is None or models is None:
        usual_tables, usual_models = ON_CPU if _on_cpu(line, models) else ON_GPU
        tables = tables or [TABLES[name] for name in usual_tables]
        models = models or [Model(name) for name in usual_models]
    given = list(pieces(argv, {**BY_NAME, **{flag.name: flag for flag in known_flags()}}))
    _check_flags([flag.name for flag, _ in given if flag is not None], tables)
    _check_settings(line, models)
    folder = Path(line.own.get("DIR", ("output/tables", ""))[0]).expanduser()
    jobs = [_job(table, model, given, folder) for table in tables for model in _taken(table, models)]
    for job in jobs:
        _check_file(job)
    return Asked(jobs, folder, seconds)


def _tables(line: ToolLine) -> list[Table] | None:
    if "TABLES" not in line.own:
        return None
    text, flag = line.own["TABLES"]
    for name in text.split(","):
        if name not in TABLES:
            raise UserError(f"{flag} {text}: there is no {name!r}.{nearest(name, TABLES)} Known: {', '.join(TABLES)}.")
    return [TABLES[name] for name in dict.fromkeys(text.split(","))]


def _models(line: ToolLine) -> list[Model] | None:
    if "ALL_MODELS" not in line.own:
        loaded = line.load()
        return None if loaded.sources["MODEL.NAME"] == "default" else [Model(loaded.config.MODEL.NAME)]
    text, flag = line.own["ALL_MODELS"]
    models: list[Model] = []
    for word in text.split(","):
        name, colon, batch = word.partition(":")
        if not name or (colon and not (batch.isdecimal() and int(batch))):
            raise UserError(f"{flag} {text}: takes names, with or without a batch size, such as {ON_GPU[1][0]}:512.")
        models.append(Model(name, int(batch) if colon else None))
    for key, wrong in (("MODEL.NAME", True), ("DATA.BATCH_SIZE", any(model.batch for model in models))):
        if wrong and key in line.run.words:
            raise UserError(f"{key}={line.run.words[key]}: it would be that for all of {flag} {text}; leave one out.")
    return list(dict.fromkeys(models))


def _taken(table: Table, models: list[Model]) -> list[Model | None]:
    """A table that knows no model is measured once."""
    return [*models] if MODEL in table.flags else [None]


def _on_cpu(line: ToolLine, models: list[Model] | None) -> bool:
    from engine.machine.device import pick_device
    from utils.distributed.world import ALONE

    given = {"MODEL.NAME": (models[0].name, "-models")} if models else {}
    return pick_device(line.load(given).config.DEVICE, ALONE).type == "cpu"


def _check_flags(given: list[str], tables: list[Table]) -> None:
    """Each must be known to one of the tables, and mean the same to all that know it."""
    for name in given:
        owners = [FOR_ONE[name][0]] if name in FOR_ONE else SHARED.get(name)
        if owners is None:
            continue
        takers = [table for table in owners if table in tables]
        if not takers:
            raise UserError(
                f"-{name}: only {' and '.join(table.name for table in owners)} would take it, "
                f"and the tables here are {', '.join(table.name for table in tables)}."
            )
        shapes = {_flags_of(table)[name].value for table in takers} if name in SHARED else ()
        if len(shapes) > 1:
            alone = " or ".join(f"-{table.name}_{name}" for table in takers)
            raise UserError(f"-{name}: it means another thing to each of its tables; give {alone}.")


def _check_settings(line: ToolLine, models: list[Model]) -> None:
    """What is wrong for all models is told before anything begins; what is wrong for one, by its tables."""
    wrong: list[UserError] = []
    for model in models:
        try:
            line.load({"MODEL.NAME": (model.name, "-models")})
        except UserError as error:
            wrong.append(error)
    if len(wrong) == len(models):
        raise wrong[0]


def _job(table: Table, model: Model | None, given: list[tuple[Flag | None, Any]], folder: Path) -> Job:
    words = [] if model is None else ["-model", model.name]
    words += [] if model is None or model.batch is None else ["-batch_size", str(model.batch)]
    names, mine = {flag.name for flag, _ in given if flag}, _flags_of(table)
    for flag, value in given:
        if flag is None:
            words.append(value)
        elif flag.name in FOR_ONE:
            owner, plain = FOR_ONE[flag.name]
            words += _spelled(plain.name, value) if owner is table else []
        elif flag.name in SHARED:
            ours = flag.name in mine and f"{table.name}_{flag.name}" not in names
            words += _spelled(flag.name, value) if ours else []
        elif flag.name not in OWN_NAMES and not (flag.name == "batch_size" and model and model.batch):
            words += _spelled(flag.name, value)
    of = model.words if model is not None else ""
    stem = "_".join(filter(None, re.split(r"\W+", f"{table.name} {of}")))
    return Job(table, of, words, folder / f"{stem}.json")


def _spelled(name: str, value: str | None) -> list[str]:
    if value is None:
        return [f"-{name}"]
    return [f"-{name}={value}"] if value.startswith("-") else [f"-{name}", value]


def _check_file(job: Job) -> None:
    """A file of another measurement is found before anything is measured."""
    found = job.kept()
    if found is None:
        return
    if sorted(shlex.split(found["command"])) != sorted(shlex.split(job.command)):
        raise UserError(
            f"{job.file}: it was measured by `{found['command']}`, and this call would do it by `{job.command}`. "
            "Give the same flags and settings, or another -dir."
        )
    if found.get("versions") != versions():
        raise UserError(f"{job.file}: it was measured with other versions, {found.get('versions')}; give another -dir.")
