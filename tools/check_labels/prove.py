"""Did it help? Trainings with all labels, without the suspects, with proposed labels, and without random images.

Each seed has a search of its own. A validation split that no search reads decides, with its labels as given.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from engine.machine.device import describe_device, pick_device
from tools.check_labels.noise import WRONG
from tools.check_labels.search import Images, Method, Suspect, find, load_with, open_images, rows_of, suspects_of
from tools.common.command_line import ToolLine
from tools.common.comparison import judged_by, spread
from tools.common.per_image import per_image, values_of_images
from tools.common.turns import alternating_order
from tools.compare.command import report, write
from tools.compare.runs import Plan, Run, check_runs, read_seeds, train_all
from utils.config import Config
from utils.distributed.world import ALONE
from utils.errors import EXIT_DONE, EXIT_FAILED
from utils.log import log
from utils.record.predictions import GROUPS
from utils.record.run_folder import write_json
from utils.statistics.crossed import crossed_interval
from vitamp.files import write_atomically
from vitamp.metrics import TOP1

ALL = "all labels"
WITHOUT = "without suspects"
RELABELLED = "relabelled"
RANDOM = "without random images"
ARMS = (ALL, WITHOUT, RELABELLED, RANDOM)
DECISIONS = {WITHOUT: "drop", RELABELLED: "relabel", RANDOM: "drop"}


def prove(line: ToolLine, config: Config, method: Method, out: Path) -> int:
    seeds = read_seeds(line.asked.seeds)
    images = open_images(config, "train")
    lists = search_each_seed(images, method, seeds, out / "lists")
    if not lists:
        log.info("No search found wrong labels beyond chance: there is nothing to prove.")
        return EXIT_DONE
    others = replace(open_images(config, "val"), classes=images.classes)  # it may have no image of the last classes
    doubtful, _ = suspects_of(others, method.logits_of_others(others), seeds[-1], np.empty(0, np.int64))
    wrong = [one for one in doubtful if one.wrong >= WRONG]

    plan = plan_of(line, seeds, lists, out)
    script = "scripts/check_labels.py"
    trained = train_all(plan, lambda so_far: write(plan, so_far, out, script), method.budget)
    about = write(plan, trained, out, script)
    predicted = report(about, out)
    if trained.failed or trained.left_out:
        return EXIT_FAILED if trained.failed else EXIT_DONE
    log_what_helped(about["verdicts"])
    if len(seeds) > 1 and len(predicted) == len(plan.runs):
        write_json(out / "compare.json", {**about, "at_best": at_best(plan, predicted)})
    if plan.judged.metric is TOP1 and wrong:
        log_without(plan, wrong, len(others.labels))
    return EXIT_DONE


def search_each_seed(images: Images, method: Method, seeds: Sequence[int], out: Path) -> dict[tuple[str, int], Path]:
    """The tables of DATA.RELABEL by arm and seed; none of a seed whose search found nothing."""
    lists = dict[tuple[str, int], Path]()
    out.mkdir(parents=True, exist_ok=True)
    for seed in seeds:
        found = find(images, method, seed)
        log.info("Search with seed %d: %s", seed, " ".join(found.words()))
        if not found.verdict.clear:
            continue
        for arm, decision in DECISIONS.items():
            rows = random_like(images, found.suspects, seed) if arm == RANDOM else found.suspects
            lists[arm, seed] = out / f"{arm.replace(' ', '_')}-{seed}.csv"
            write_atomically(lists[arm, seed], rows_of(images, rows, decision))
    return lists


def plan_of(line: ToolLine, seeds: tuple[int, ...], lists: Mapping[tuple[str, int], Path], out: Path) -> Plan:
    """The trainings. Where a search found nothing, all arms have all labels."""
    runs = []
    for seed, arm in alternating_order(ARMS, seeds):
        given: dict[str, tuple[Any, str]] = {"SEED": (seed, "-seeds")}
        if (arm, seed) in lists:
            given["DATA.RELABEL"] = (f"{lists[arm, seed]}", "-prove")
        runs.append(Run(arm, seed, load_with(line, given), out / f"{arm.replace(' ', '_')}-{seed}"))
    check_runs(runs)
    judged = judged_by(None, None, [run.config for run in runs])
    device = pick_device(runs[0].config.DEVICE, ALONE)
    name = describe_device(device)
    budget = line.asked.budget_min
    return Plan(ARMS, judged, None, tuple(runs), name, False, (), ("DATA.RELABEL",), budget)


def log_what_helped(verdicts: Sequence[Mapping[str, Any]]) -> None:
    found = {verdict["mode"]: verdict["accuracy"] for verdict in verdicts if verdict["against"] == ALL}
    higher = [arm for arm, one in found.items() if one and one["seen"] and one["value"] > 0]
    if RANDOM in higher:
        log.info("Leaving out random images helped too, so the wrong labels may not be the reason.")
    helped = " and ".join(arm for arm in (WITHOUT, RELABELLED) if arm in higher)
    log.info(f"It helped: {helped}." if helped else "It was not shown to help.")


def log_without(plan: Plan, wrong: Sequence[Suspect], images: int) -> None:
    """Log top-1 on the validation images that are no suspects."""
    remaining = np.setdiff1d(np.arange(images), [one.image for one in wrong])
    log.info(
        "%d labels of the validation split look wrong, too. On its other %d images, which flatters, since suspects "
        "are those on which models fail:",
        len(wrong),
        len(remaining),
    )
    for arm in ARMS:
        lasts = [per_image(run.folder, TOP1, plan.judged.weights) for run in plan.runs if run.contender == arm]
        means = [float(last.values[np.isin(last.rows, remaining)].mean()) for last in lasts if last is not None]
        log.info("  %s: top-1 %s %%", arm, spread(means) if means else "unknown")


def at_best(plan: Plan, predicted: Mapping[Path, Any]) -> list[dict[str, Any]]:
    """Compare the checkpoints that a user gets: the best, and of their weights those that validated better.

    `predicted`: of `report`, which evaluated them.
    """
    log.info("At each run's best checkpoint, which these very images chose:")
    found = dict[str, np.ndarray]()
    groups = next(iter(predicted.values()))[1][GROUPS]
    for arm in ARMS:
        folders = [run.folder for run in plan.runs if run.contender == arm]
        values = (values_of_images(plan.judged.metric, *predicted[folder]) for folder in folders)
        found[arm] = np.stack([each for each in values if each is not None])
    every = np.stack([each.mean(1) for each in found.values()])
    verdicts = list[dict[str, Any]]()
    for arm in (WITHOUT, RELABELLED, RANDOM):
        value = float(found[arm].mean() - found[ALL].mean())
        one = crossed_interval(value, found[arm], found[ALL], every, groups, len(ARMS) - 1)
        verdicts.append({"mode": arm, "against": ALL, **asdict(one)})
        said = "within noise"
        if one.seen:
            said = "higher" if value > 0 else "lower"
        log.info(
            "  %s: %s %s against %s: %s (%+.1f to %+.1f points for %s)",
            arm,
            plan.judged.metric.words,
            spread(found[arm].mean(1).tolist()),
            spread(found[ALL].mean(1).tolist()),
            said,
            one.low,
            one.high,
            one.holds_for,
        )
    return verdicts


def random_like(images: Images, suspects: Sequence[Suspect], seed: int) -> list[Suspect]:
    """As many images as suspects, at random, of each given label; with several labels per image, of all."""
    generator = np.random.default_rng(seed)
    chosen = []
    kinds = images.labels if images.labels.ndim == 1 else np.zeros(len(images.labels))
    others = np.setdiff1d(np.arange(len(kinds)), [one.image for one in suspects])
    for kind in np.unique(kinds):
        of_kind = [one for one in suspects if kinds[one.image] == kind]
        pool = others[kinds[others] == kind]
        for one, index in zip(of_kind, generator.permutation(pool).tolist(), strict=False):
            chosen.append(one._replace(image=index, given=images.label_words(images.labels[index]), certain=False))
    return chosen
