"""Folds, the balanced sampler and class weights, as a user meets them."""

from __future__ import annotations

from pathlib import Path

from tests.program import Vitamp


def test_other_sampler_within_an_epoch_is_refused(vitamp: Vitamp, tiny: Path, tmp_path: Path) -> None:
    words = ("-cfg", tiny, "-output", tmp_path / "run")
    vitamp(*words, "TRAIN.MAX_UPDATES=10", code=0)
    done = vitamp(*words, "DATA.SAMPLER=balanced", "-resume", "auto", code=2)
    assert "1437 as before, in another order. They depend on SEED, DATA.SAMPLER, DATA.EXCLUDE" in done.err


def test_other_fold_is_refused_on_resuming(vitamp: Vitamp, tiny: Path, tmp_path: Path) -> None:
    """At the end of an epoch, too: the run would be validated on images that it was trained on."""
    words = ("-cfg", tiny, "-output", tmp_path / "run", "DATA.BATCH_SIZE=128")
    first = vitamp(*words, "DATA.FOLD=2/5", "TRAIN.NUM_EPOCHS=1", code=0)
    assert "1,437 training and 360 validation images" in first.out
    assert "validation on fold 2/5" in first.out
    for other in ("DATA.FOLD=3/5", "DATA.FOLD=null", "DATA.SPLIT_SEED=1"):
        done = vitamp(*words, "DATA.FOLD=2/5", other, "-resume", "auto", code=2)
        assert "trained with DATA.FOLD 2/5 and DATA.SPLIT_SEED 0" in done.err
    done = vitamp("-eval", "-resume", tmp_path / "run", code=0)
    assert "validation split: 360 images" in done.out, "the run's own fold"
