"""Measure whether a search helped: train with all labels, and with those that the search changes or leaves out.

The recipe is trained with all labels, without the suspects, with the proposed labels, and without random images. Each
seed has a search of its own. A validation split that no search reads decides, with its labels as given.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from engine.machine.device import describe_device, pick_device
from tools.check_labels.methods import Method, load_with
from tools.check_labels.search import find_suspects, judge_labels, table_of_suspects
from tools.check_labels.searched_images import Images, Suspect, open_images, open_validation
from tools.check_labels.wrong_labels import WRONG
from tools.common.command_line import ToolLine
from tools.common.comparison import judged_by, spread
from tools.common.per_image import per_image, values_of_images
from tools.common.turns import alternating_order
from tools.compare.command import report, write
from tools.compare.plan import read_seeds
from tools.compare.runs import Plan, Run, check_runs, train_all
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
"""The contenders of the comparison; the first is the baseline"""
DECISIONS = {WITHOUT: "drop", RELABELLED: "relabel", RANDOM: "drop"}
"""The decision about each listed image in the table of DATA.RELABEL of an arm"""


def prove(line: ToolLine, config: Config, method: Method, out: Path) -> int:
    """Search with each seed, train all arms, and log whether it helped. Returns the exit code.

    An arm is one way to use the labels: all of them, without the suspects, relabelled, or without random images.
    Results and runs are written to `out`, as compare.py writes its own.
    """
    seeds = read_seeds(line.asked.seeds)
    images = open_images(config, "train")
    tables = search_each_seed(images, method, seeds, out / "lists")
    if not tables:
        log.info("No search found wrong labels beyond chance: there is nothing to prove.")
        log.info("Without -prove, this command shows the most doubtful images.")
        return EXIT_DONE
    # Judge the labels of the validation split, too, by the models of the last seed's search, which still has them.
    val_images = open_validation(config, images.classes)
    val_logits = method.logits_of_unsearched(val_images)
    val_suspects, _ = judge_labels(val_images, val_logits, seeds[-1], not_judged=np.empty(0, np.int64))
    val_wrong = [suspect for suspect in val_suspects if suspect.wrong_probability >= WRONG]

    # Train, and write the comparison after each run.
    plan = plan_of(line, seeds, tables, out)
    script = "scripts/check_labels.py"
    trained = train_all(plan, lambda so_far: write(plan, so_far, out, script), method.budget)
    comparison = write(plan, trained, out, script)
    predictions_by_folder = report(comparison, out)
    if trained.failed:
        return EXIT_FAILED
    if trained.left_out:
        return EXIT_DONE
    log_what_helped(comparison["verdicts"])
    have_all_predictions = len(predictions_by_folder) == len(plan.runs)
    if len(seeds) > 1 and have_all_predictions:
        write_json(out / "compare.json", {**comparison, "at_best": at_best(plan, predictions_by_folder)})
    if plan.judged.metric is TOP1 and val_wrong:
        log_without_suspects(plan, val_wrong, len(val_images.labels))
    return EXIT_DONE


def search_each_seed(images: Images, method: Method, seeds: Sequence[int], out: Path) -> dict[tuple[str, int], Path]:
    """Search once per seed, and write the tables of DATA.RELABEL into the folder `out`.

    Returns the tables by arm (what is done with the suspects) and seed. There are none for the arm that trains with all
    labels, and for a seed whose search found no more suspects than by chance.
    """
    tables = dict[tuple[str, int], Path]()
    out.mkdir(parents=True, exist_ok=True)
    for seed in seeds:
        result = find_suspects(images, method, seed)
        log.info("Search with seed %d: %s", seed, " ".join(result.words()))
        if not result.verdict.clear:
            continue
        for arm, decision in DECISIONS.items():
            listed = result.suspects
            if arm == RANDOM:
                listed = random_like(images, result.suspects, seed)
            tables[arm, seed] = out / f"{arm.replace(' ', '_')}-{seed}.csv"
            write_atomically(tables[arm, seed], table_of_suspects(images, listed, decision))
    return tables


def plan_of(line: ToolLine, seeds: tuple[int, ...], tables: Mapping[tuple[str, int], Path], out: Path) -> Plan:
    """Plan the trainings of all arms and seeds. For a seed whose search found nothing, all arms have all labels."""
    runs = []
    for seed, arm in alternating_order(ARMS, seeds):
        settings: dict[str, tuple[Any, str]] = {"SEED": (seed, "-seeds")}  # each as its value and who gives it
        if (arm, seed) in tables:
            settings["DATA.RELABEL"] = (f"{tables[arm, seed]}", "-prove")
        runs.append(Run(arm, seed, load_with(line, settings), out / f"{arm.replace(' ', '_')}-{seed}"))
    check_runs(runs)
    judged = judged_by(name=None, weights=None, configs=[run.config for run in runs])
    device = pick_device(runs[0].config.DEVICE, ALONE)
    return Plan(
        contenders=ARMS,
        judged=judged,
        folds=None,
        runs=tuple(runs),
        device=describe_device(device),
        several_processes=False,
        remarks=(),
        varied=("DATA.RELABEL",),
        budget_min=line.asked.budget_min,
    )


def log_what_helped(verdicts: Sequence[Mapping[str, Any]]) -> None:
    """Log which arms are better than all labels, and a warning if one of them leaves out random images.

    `verdicts`: of compare.json; the accuracy of one is None where too few runs were trained.
    """
    higher = []
    for verdict in verdicts:
        difference = verdict["accuracy"]
        # A difference is seen if its confidence interval does not contain 0.
        if verdict["against"] == ALL and difference and difference["seen"] and difference["value"] > 0:
            higher.append(verdict["mode"])
    if RANDOM in higher:
        log.info("Leaving out random images helped too, so the wrong labels may not be the reason.")
    helped = " and ".join(arm for arm in (WITHOUT, RELABELLED) if arm in higher)
    log.info(f"It helped: {helped}." if helped else "It was not shown to help.")


def log_without_suspects(plan: Plan, val_wrong: Sequence[Suspect], val_images: int) -> None:
    """Log top-1 of each arm after the last epoch, on the validation images that are no suspects.

    It flatters the models, because suspects are those on which models fail. `val_wrong`: suspects of the validation
    split. `val_images`: number of all its images.
    """
    remaining = np.setdiff1d(np.arange(val_images), [suspect.image for suspect in val_wrong])
    log.info(
        "%d labels of the validation split look wrong, too. On its other %d images, which flatters, since suspects "
        "are those on which models fail:",
        len(val_wrong),
        len(remaining),
    )
    for arm in ARMS:
        accuracies = []
        for run in plan.runs:
            if run.contender == arm:
                last_epoch = per_image(run.folder, TOP1, plan.judged.weights)
                if last_epoch is not None:
                    in_remaining = np.isin(last_epoch.rows, remaining)
                    accuracies.append(float(last_epoch.values[in_remaining].mean()))
        log.info("  %s: top-1 %s %%", arm, spread(accuracies) if accuracies else "unknown")


def at_best(plan: Plan, predictions_by_folder: Mapping[Path, Any]) -> list[dict[str, Any]]:
    """Compare the best checkpoints of all runs, each with its plain or EMA weights, whichever validated better.

    `predictions_by_folder`: for each run's folder, labels and columns of predictions of these checkpoints, as `report`
    returns them. An arm is one way to use the labels. Logs one line per arm, and returns the verdicts of each against
    the arm with all labels, for compare.json.
    """
    log.info("At each run's best checkpoint, which these very images chose:")
    values_by_arm = dict[str, np.ndarray]()  # seeds x images
    _, columns_of_first_run = next(iter(predictions_by_folder.values()))
    groups = columns_of_first_run[GROUPS]  # all runs predict the same images
    for arm in ARMS:
        folders = [run.folder for run in plan.runs if run.contender == arm]
        values_by_run = (values_of_images(plan.judged.metric, *predictions_by_folder[folder]) for folder in folders)
        values_by_arm[arm] = np.stack([values for values in values_by_run if values is not None])
    means = np.stack([values.mean(1) for values in values_by_arm.values()])  # arms x seeds
    baseline = values_by_arm[ALL]
    other_arms = (WITHOUT, RELABELLED, RANDOM)
    verdicts = list[dict[str, Any]]()
    for arm in other_arms:
        values = values_by_arm[arm]
        difference = float(values.mean() - baseline.mean())
        interval = crossed_interval(difference, values, baseline, means, groups, comparisons=len(other_arms))
        verdicts.append({"mode": arm, "against": ALL, **asdict(interval)})
        verdict = "within noise"
        if interval.seen:
            verdict = "higher" if difference > 0 else "lower"
        log.info(
            "  %s: %s %s against %s: %s (%+.1f to %+.1f points for %s)",
            arm,
            plan.judged.metric.words,
            spread(values.mean(1).tolist()),
            spread(baseline.mean(1).tolist()),
            verdict,
            interval.low,
            interval.high,
            interval.holds_for,
        )
    return verdicts


def random_like(images: Images, suspects: Sequence[Suspect], seed: int) -> list[Suspect]:
    """Choose as many other images as there are suspects, at random, of each given label.

    With several labels per image, they are chosen from all images. Each image is returned in place of a suspect, with
    its own label. The other fields stay those of the suspect; they mean nothing, since the images are only dropped.
    """
    generator = np.random.default_rng(seed)
    chosen = []
    labels = images.labels
    if labels.ndim > 1:
        labels = np.zeros(len(labels))  # as if all had the same label
    not_suspected = np.setdiff1d(np.arange(len(labels)), [suspect.image for suspect in suspects])
    for label in np.unique(labels):
        suspects_of_label = [suspect for suspect in suspects if labels[suspect.image] == label]
        pool = generator.permutation(not_suspected[labels[not_suspected] == label]).tolist()
        for suspect, image in zip(suspects_of_label, pool, strict=False):
            given = images.label_words(images.labels[image])
            chosen.append(suspect._replace(image=image, given=given, copy_disagrees=False))
    return chosen
