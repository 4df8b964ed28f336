"""Rules between settings: what is refused, what has no effect, and what the log and the reference say about both."""

from __future__ import annotations

import pytest

from utils.config import load_config
from utils.config.fields import Rule, broken, excludes, needs, only_with, overridden_by, rules_of
from utils.config.keys import allowed, settings
from utils.errors import UserError

RULES = [(key, rule) for key, field in settings().items() for rule in rules_of(field)]
FSDP, LABELS, AMP = ["DIST.STRATEGY=fsdp"], ["DATA.MULTI_LABEL=true"], ["AMP.ENABLED=true"]
TEACHER = ["TRAIN.DISTILLATION_TYPE=hard", "TRAIN.TEACHER_MODEL=resnet18"]
MUON = ["TRAIN.OPTIMIZER.NAME=NMuon"]


def loaded(words: list[str]) -> tuple[str, ...]:
    return load_config(words=dict(word.split("=", 1) for word in words)).notes


@pytest.mark.parametrize(
    ("word", "others", "reason"),
    [
        ("DATA.BATCH_SIZE=auto", FSDP, "DIST.STRATEGY fsdp: the search for a batch size does not support FSDP; give a"),
        ("DATA.BATCH_SIZE=1", ["TRAIN.MIXUP_ALPHA=0.8"], "TRAIN.MIXUP_ALPHA 0.8: mixup and CutMix mix images"),
        ("DATA.BATCH_SIZE=1", ["TRAIN.CUTMIX_MINMAX=[0.2, 0.8]"], "TRAIN.CUTMIX_MINMAX [0.2, 0.8]: mixup and CutMix"),
        (
            "DATA.PART=test",
            [],
            "needs EVAL=true: training always validates on the validation split; add -eval",
        ),
        ("DATA.SAMPLER=balanced", LABELS, "DATA.MULTI_LABEL: drawing an image for one of its labels draws the others"),
        ("MODEL.RESUME=auto", [], "needs OUTPUT: auto looks in the run's own folder; name it with -output"),
        (
            "MODEL.UNFREEZE_EPOCH=2",
            [],
            "needs MODEL.FREEZE: without it, nothing is frozen that could be unfrozen",
        ),
        ("TRAIN.LOSS=ce", LABELS, "DATA.MULTI_LABEL: cross-entropy has one class per image; leave TRAIN.LOSS out, or"),
        ("TRAIN.CLASS_WEIGHTS=balanced", TEACHER, "TRAIN.DISTILLATION_TYPE hard: the teacher's loss has no class weig"),
        ("TRAIN.MODEL_EMA_FORCE_CPU=true", FSDP, "DIST.STRATEGY fsdp: FSDP shards the EMA; leave TRAIN.MODEL_EMA_FORC"),
        ("TRAIN.AUGMENT=[trivial]", ["TRAIN.AUTO_AUGMENT=true"], "TRAIN.AUTO_AUGMENT: these policies were never"),
        (
            "TRAIN.AUGMENT=[three]",
            ["TRAIN.AUTO_AUGMENT=true", "TRAIN.RAND_AUGMENT=true"],
            "TRAIN.RAND_AUGMENT and TRAIN.AUTO_AUGMENT: these policies were never meant to be combined; choose one",
        ),
        ("TRAIN.DISTILLATION_TYPE=soft", LABELS, "DATA.MULTI_LABEL: its loss is a softmax cross-entropy over the"),
        ("AMP.DTYPE=fp8", [*AMP, *FSDP], "DIST.STRATEGY fsdp: FSDP with fp8 is not supported; use bf16 or fp16, or"),
        ("AMP.LEVEL=O3", [*AMP, *FSDP], "DIST.STRATEGY fsdp: FSDP with O3 is not supported; use O1, O2 or NAIVE"),
        ("AMP.AUTO_FP32=true", [*AMP, *FSDP], "DIST.STRATEGY fsdp: vitamp does not replay skipped updates of FSDP"),
        (
            "DIST.STRATEGY=fsdp",
            ["DEVICE=mps"],
            "DEVICE mps: FSDP needs several devices, and MPS is one; leave DIST.STR",
        ),
        (
            "DIST.HSDP=true",
            [],
            "needs DIST.STRATEGY=fsdp: it says how FSDP shards the weights; set DIST.STRATEGY=fsdp",
        ),
    ],
)
def test_broken_rule_is_refused(word: str, others: list[str], reason: str) -> None:
    key, value = word.split("=")
    with pytest.raises(UserError) as caught:
        loaded([word, *others])
    text = f"command line: {key}: {value} {'' if reason.startswith('needs') else 'is not possible with '}{reason}"
    assert str(caught.value).startswith(text), caught.value


@pytest.mark.parametrize(
    "words",
    [
        ["DATA.BATCH_SIZE=1", "TRAIN.MIXUP_ALPHA=0.8", "EVAL=true"],
        ["DATA.PART=test", "EVAL=true"],
        ["DATA.PART=val"],
        ["MODEL.RESUME=auto", "OUTPUT=there"],
        ["MODEL.UNFREEZE_EPOCH=2", "EVAL=true"],
        ["TRAIN.CLASS_WEIGHTS=balanced", *TEACHER, "EVAL=true"],
        [*LABELS, *TEACHER, "EVAL=true"],
        ["TRAIN.RAND_AUGMENT=true", "TRAIN.AUTO_AUGMENT=true"],
        ["AMP.DTYPE=fp8", *FSDP],
        ["AMP.LEVEL=O2", *AMP, *FSDP],
    ],
)
def test_unbroken_rule_is_silent(words: list[str]) -> None:
    loaded(words)


@pytest.mark.parametrize(
    ("word", "others", "reason"),
    [
        ("DATA.VAL_FRACTION=0.3", ["DATA.FOLD=2/5"], "with DATA.FOLD 2/5: its fold is the validation split"),
        ("MODEL.PRETRAINED=a", ["MODEL.RESUME=/no/run"], "with MODEL.RESUME /no/run: the run's own weights are loaded"),
        ("MODEL.NEW_CLASSIFIER=true", [], ": MODEL.PRETRAINED is null; without weights to start from, every"),
        ("TRAIN.BCE_TARGET_THRESH=0.2", [], ": TRAIN.LOSS is ce, not bce"),
        ("TRAIN.COLOR_JITTER=0.4", ["TRAIN.AUGMENT=trivial"], "with TRAIN.AUGMENT"),
        ("TRAIN.AUTO_AUGMENT=true", ["TRAIN.RAND_AUGMENT=true"], "with TRAIN.RAND_AUGMENT"),
        ("AMP.LEVEL=O2", [], ": AMP.ENABLED is false; -amp turns AMP on"),
        ("AMP.DTYPE=fp8", FSDP, ": AMP.ENABLED is false"),
    ],
)
def test_setting_without_effect_is_noted(word: str, others: list[str], reason: str) -> None:
    text = f"command line: {word.partition('=')[0]} has no effect{reason if reason[0] == ':' else f' {reason}'}"
    assert next(note for note in loaded([word, *others]) if "effect" in note).startswith(text)


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["AMP.TF32=true"],
        ["AMP.LEVEL=O1"],
        ["MODEL.NEW_CLASSIFIER=true", "MODEL.PRETRAINED=a run"],
        ["MODEL.PRETRAINED=a", "MODEL.RESUME=auto", "OUTPUT=/no"],
        ["TRAIN.COLOR_JITTER=0.4", "TRAIN.AUGMENT=three"],
    ],
)
def test_setting_with_effect_is_not_noted(words: list[str]) -> None:
    assert [note for note in loaded(words) if "no effect" in note] == []


def test_rules_name_settings_that_exist_and_say_why() -> None:
    wrong = []
    for key, rule in RULES:
        if rule.is_error and not rule.why:
            wrong.append(f"{key}: no reason")
        named = [(key, rule.at), *((one.key, one.values) for one in (*rule.others, *rule.when))]
        for name, values in named:
            words = allowed(name) if name in settings() else None
            if words is None or (" or " in words and not any(kind in words for kind in ("text", "number"))):
                wrong += [f"{key}: {name}={value}" for value in values or ("",) if value not in (words or "")]
    assert wrong == []


def test_setting_without_effect_breaks_no_other_rule() -> None:
    rules = [excludes("B", why="x"), only_with("C"), overridden_by("D"), needs("E=2|3", "F!=4", why="y", at="1|2")]

    def kinds(value: object, **values: object) -> list[Rule]:
        return broken(rules, value, 0, values.get)

    assert kinds(0) == []
    assert kinds(1) == kinds(1, B=1, D=1) == [rules[1]]
    assert kinds(1, C=1, D=1, B=1) == [rules[2]]
    assert kinds(1, C=1, B=1) == kinds(1, C=1, B=1, E=1, F=4) == [rules[0], rules[3]]
    assert kinds(1, C=1, E=3) == kinds(1, C=1, F=5) == kinds(3, C=1) == []
    assert list(map(str, rules)) == [
        "Not with B.",
        "Only with C.",
        "No effect with D.",
        "1 or 2: needs E=2 or 3 or F other than 4.",
    ]
