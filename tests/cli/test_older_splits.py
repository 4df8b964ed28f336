"""A run of an earlier version, whose images may be split otherwise now."""

from pathlib import Path

from tests.program import Vitamp, change_settings, save_image
from tests.tools.test_evaluated_data import RECIPE


def test_weights_of_an_earlier_version_are_evaluated_on_the_images_it_did_not_train_on(
    vitamp: Vitamp, tmp_path: Path
) -> None:
    data, run = tmp_path / "set", tmp_path / "run"
    for number in range(24):
        save_image(data / "ab"[number % 2] / f"{number}.jpg", number, (12, 12))
    (tmp_path / "recipe.yaml").write_text(RECIPE.format(path=data, exclude="null"))
    vitamp("-cfg", tmp_path / "recipe.yaml", "-output", run, "MODEL.NUM_CLASSES=2", code=0)
    change_settings(run, {"DATA.LISTING": 1, "TRAIN.OOM": "stop"}, without="SPEED")
    saved = (run / "config.yaml").read_text().replace("  KNN: null\n", "  KNN:\n    K: 20\n")
    (run / "config.yaml").write_text(f"{saved}LOCAL_NOISE: 3\n")
    gone = "of another version of vitamp; its settings that this version does not have: "
    done = vitamp("-eval", "-resume", run, "-output", tmp_path / "eval", code=0)
    assert f"{gone}TRAIN.KNN, LOCAL_NOISE\n" in done.text
    done = vitamp(run, script="scripts/evaluate.py", code=0)
    assert f"{gone}DATA.LISTING, TRAIN.OOM\n" in done.text
    assert "validation split: 3 images" in done.text
    change_settings(run, {"TRAIN.CLASS_WEIGHTS": str(tmp_path / "gone.csv")})
    vitamp(run, script="scripts/evaluate.py", code=0)
    change_settings(run, {"TRAIN.CLASS_WEIGHTS": "balanced", "TRAIN.MIXUP_ALPHA": 0.8, "TRAIN.MIXUP_MODE": "elem"})
    vitamp(run, script="scripts/evaluate.py", code=0)
    vitamp("-cfg", run / "config.yaml", "-pretrained", run, "-output", tmp_path / "fine", "-dry_run", code=0)
    save_image(data / "a" / "new.jpg", 1, (12, 12))
    for words in (("-eval", "-resume", run, "-output", tmp_path / "again"), (run,)):
        done = vitamp(*words, **({} if len(words) > 1 else {"script": "scripts/evaluate.py"}), code=2)
        assert "would now be split otherwise than in its training" in done.err
