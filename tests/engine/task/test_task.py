"""That every metric which is computed has a name and words in utils/record/tasks.py."""

from dataclasses import fields

import pytest
import torch

from datasets import Batch
from engine.task import own_code
from engine.task.base import Metrics
from engine.task.one import OneLabel, ValidationMeans
from engine.task.several import LabelMetrics, SeveralLabels
from utils.config import load_config
from utils.distributed.world import ALONE
from utils.errors import UserError
from vitamp.metrics import METRICS, NO_LABELS, ONE_LABEL, SEVERAL_LABELS, TaskKind


@pytest.mark.parametrize(("metrics", "kind"), [(ValidationMeans, ONE_LABEL), (LabelMetrics, SEVERAL_LABELS)])
def test_computed_metrics_are_those_of_the_task(metrics: type[Metrics], kind: TaskKind) -> None:
    others = {"thresholds", "trivial", "more", "predictions"}
    computed = {field.name for field in fields(metrics)} - others  # pyright: ignore[reportArgumentType]
    assert computed == {metric.name for metric in kind.metrics}
    assert kind.best in kind.metrics


def test_save_best_by_takes_what_the_run_measures() -> None:
    """Its default is the first of what its labels allow; anything else is refused, a typo with the nearest name."""
    several, unlabelled = {"DATA.MULTI_LABEL": "true"}, {"MODEL.MAE_PRETRAIN": "true"}
    for kind, words in ((ONE_LABEL, {}), (SEVERAL_LABELS, several), (NO_LABELS, unlabelled)):
        assert load_config(words=words).config.SAVE_BEST_BY == kind.deciding[0] == kind.best.name
        assert kind.deciding[-1] == "loss"
        known = {"TRAIN.KNN": "digits"} if kind is NO_LABELS else {}
        for name in METRICS:
            if name in kind.deciding:
                assert name == load_config(words={**words, **known, "SAVE_BEST_BY": name}).config.SAVE_BEST_BY
            else:
                with pytest.raises(UserError, match=r"SAVE_BEST_BY: .* is not measured"):
                    load_config(words={**words, **known, "SAVE_BEST_BY": name})
    with pytest.raises(UserError, match=r"mapp is not measured .* Did you mean map\?"):
        load_config(words={**several, "SAVE_BEST_BY": "mapp"})
    with pytest.raises(UserError, match=r"is not measured without labels. It needs TRAIN.KNN. Use"):
        load_config(words={**unlabelled, "SAVE_BEST_BY": "knn_acc1"})


def test_logits_of_the_mean_have_its_probabilities() -> None:
    generator = torch.Generator().manual_seed(2)
    outputs = [20 * torch.randn(5, 4, generator=generator) for _ in range(3)]
    for task, activation in ((OneLabel(4), lambda logits: logits.softmax(-1)), (SeveralLabels(4), torch.sigmoid)):
        found = activation(task.averaged(outputs))
        torch.testing.assert_close(found, torch.stack([activation(logits) for logits in outputs]).mean(0))
    far = [torch.tensor([[-300.0, 300.0]])] * 2
    torch.testing.assert_close(SeveralLabels(2).averaged(far), far[0], msg="far from rounding to 0 and 1")


def test_own_metrics_get_the_column_of_one_class(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_code, "measured", lambda *given: {"columns": given[-1].ndim})
    task, cpu = SeveralLabels(1), torch.device("cpu")
    tally = own_code.WithOwnMetrics(task.tally(1, cpu), task, 1, cpu)
    tally.add(torch.zeros(1, 1), Batch(torch.zeros(1), torch.ones(1, 1), torch.arange(1)))
    assert tally.metrics(ALONE).more == {"columns": 2}
