"""evaluate.py: metrics of the user's own (VALIDATE_METRICS), if the command line allows to execute their files."""

from __future__ import annotations

from engine.saved.trained import Trained
from tools.common.parts import Part, outputs_of
from utils.log import log


def executes_metrics(trained: Trained) -> bool:
    """Execute the files of the run's own metrics. False without such files, or without consent."""
    names, chosen = trained.config.VALIDATE_METRICS, trained.chosen
    if not names:
        return False
    from engine.own_code.use import may_execute, use_of_meta

    if not may_execute(chosen.meta, chosen.place, names):
        what = ", ".join(names)
        log.info("VALIDATE_METRICS %s: not computed, because that executes code of the run; -trust does.", what)
        return False
    use_of_meta(chosen.meta, trained.config, chosen.place, ("metric",))
    return True


def own_metrics(trained: Trained, part: Part) -> dict[str, float]:
    from engine.task.own import measured

    logits, labels = outputs_of(trained, part)
    return measured(trained.config.VALIDATE_METRICS, trained.task.probabilities(logits), labels.long())
