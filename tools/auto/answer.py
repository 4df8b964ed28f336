"""The answer of auto.py: the evaluation of the final run on the test images, and what it leaves open."""

import shlex
from pathlib import Path

import numpy as np

from engine.report.trust import CHANCE
from engine.trained.model import Trained, load_trained, split_of_run
from tools.auto.candidates import Gain, build, probe
from tools.auto.data import KNOWN_THINGS, write_probed
from tools.auto.search import Search
from tools.check_labels.methods import ByFeatures
from tools.check_labels.search import find_suspects
from tools.check_labels.searched_images import open_images
from tools.common.evaluation import OneLabel, measured, with_bar
from tools.common.tables import in_columns, shown
from tools.common.trust import doubts_of
from utils.cli import command_line
from utils.errors import UserError
from utils.program import entry, tool
from utils.record.run_folder import CONFIG
from utils.text import clock, counted, some_of
from vitamp.metrics import BALANCED
from vitamp.pooling import pool_of

MOST_DOUBTS = 3
APART = 1.0
"""Points between top-1 and balanced accuracy, from which on both are shown"""
USUAL_EPOCHS = 20
"""Epochs of configs/finetune.yaml; with fewer, more time may help"""
HIGH_RATE = 0.1
"""Fraction of the highest learning rate, above which a training that was cut may have had more to gain"""


def answer(search: Search) -> list[str]:
    """Evaluate the final run on the test images, once, and return its accuracy beside all that it compares with."""
    record = search.record
    content = record.content
    run = Path(content["run"])
    given = command_line({"eval": True}, {"DATA.PART": "test"})
    trained = load_trained(run, given=given)
    test = split_of_run(trained, "test")
    evaluation = OneLabel.of(trained, with_bar(trained, test), test.groups())
    result, doubts = doubts_of(trained, test, evaluation)
    winner = content["winner"]
    probed_images = write_probed(search.final_table, search.probe_table)
    probed, _ = build(search.candidates[winner].load(search.line, search.probe_table))
    probe_on_test, more_images = probe(probed).on_test()

    top1 = measured(result.value, result.interval)
    balanced = evaluation.values[BALANCED]
    lines = [
        f"Answer: {winner}, {content['how']}: top-1 {top1} of {len(test):,} test images, which decided "
        "nothing (in brackets: 95 % interval for images like these)",
        f"  beside it: always guessing the largest class {result.guess:.2f} %; the probe of these weights, of "
        f"{probed_images:,} training images, {probe_on_test}",
    ]
    if abs(balanced - result.value) >= APART:
        interval = evaluation.intervals[BALANCED.name]
        lines.append(f"  where all classes weigh alike (balanced accuracy): {measured(balanced, interval)}")
    absent = [shown(trained.name_of(int(label))) for label in np.flatnonzero(evaluation.support == 0)]
    if absent:
        lines.append(f"  no test images of {some_of(absent)}, so that nothing is known of these classes")
    rate_at_end = content["rate_at_end"]
    if rate_at_end > HIGH_RATE:
        lines.append(
            f"  Perhaps too low: training was cut at {100 * rate_at_end:.0f} % of its highest learning rate. "
            "The command below, which trains it by itself, comes to the end."
        )
    others = [doubt for doubt in doubts if doubt.kind not in (CHANCE, "classes")]  # which interval and table show
    for doubt in others[:MOST_DOUBTS]:
        if doubt.kind == "names":
            doubt.advice = f"They may show the same things. {KNOWN_THINGS}"
        lines.append(f"  {doubt.words()}")
    lines += ["", *evaluation.class_table(trained), "", *_table(content["candidates"]), ""]
    gains = [*more_images, *(Gain(*one) for one in content["larger_images"])]
    if gains:
        lines.append("What may help, by what it brought to probes; fine-tuning may gain less, or more:")
        lines += [f"  {gain.words}" for gain in sorted(gains, reverse=True)]
    if 0 < content["epochs"] < USUAL_EPOCHS:
        epochs = counted(content["epochs"], "epoch")
        lines.append(
            f"More time may help, too: it was trained for {epochs}, and {USUAL_EPOCHS} are usual. For more, add "
            f"TRAIN.NUM_EPOCHS={USUAL_EPOCHS} to the command that trains it by itself."
        )
    settings = shlex.quote(f"{run / CONFIG}")
    lines += _doubtful_labels(probed, f"-cfg {settings} -dataset csv:{shlex.quote(f'{search.probe_table}')}")
    quoted = shlex.quote(f"{run}")
    script = "main_multi_gpu" if search.several_processes else "main_single_gpu"
    lines += [
        f"Use it: {tool('predict')} {quoted} IMAGE.jpg",
        f"Judge it by later images: {tool('evaluate')} {quoted} -dataset imagefolder -data_path LATER",
        f"See its mistakes: {tool('report')} {quoted} -part test",
        f"Train it by itself: {entry(script)} -cfg {settings} MAX_TIME=null -output NEW",
        f"Time: {clock(record.used)} of {clock(record.limit)}",
    ]
    return lines


def _doubtful_labels(probed: Trained, words: str) -> list[str]:
    """Search the labels of the probe's training images, and return a line; none if too little is recognised for that.

    `words`: of a command of check_labels.py that searches the same images.
    """
    images = open_images(probed.config, "train")
    method = ByFeatures(probed, pool_of(probed.model))
    try:
        result = find_suspects(images, method, probed.config.SEED)
    except UserError:
        return []
    if not result.verdict.clear:
        return ["Labels: no evidence of wrong ones among the training images."]
    *_, verdict = result.words()
    return [f"Labels: {verdict} {tool('check_labels')} {words} -output labels lists them."]


def _table(candidates: dict[str, dict[str, str | int | float]]) -> list[str]:
    """Return the lines of a table of the candidates."""
    rows = [["", "probe in folds", "trial in validation", "pixels", "parameters", "images/s in batches"]]
    for name, about in candidates.items():
        trial = f"{about.get('trial', '-')}"
        numbers = [f"{about[key]:,}" for key in ("parameters", "images_per_second")]
        rows.append([name, f"{about['in_folds']}", trial, f"{about['pixels']}", *numbers])
    return in_columns(rows)
