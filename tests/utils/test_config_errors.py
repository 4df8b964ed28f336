"""Errors in settings name the place, the key, the value, and what is expected; rules between settings are kept."""

import time
from pathlib import Path

import pytest

from tests.refused import refusal
from utils.config import Loaded, load_config
from utils.config.fields import rules_of
from utils.config.keys import settings
from utils.config.words import allowed

SIZES = "DATA.IMAGE_SIZE=64 MODEL.PATCH_SIZE=16 TRAIN.SIZE_SCHEDULE"


def error_of(cfg: Path | None = None, *words: str) -> str:
    return refusal(load, cfg, *words)


def load(cfg: Path | None, *words: str) -> Loaded:
    return load_config(str(cfg) if cfg else None, words=dict(word.split("=", 1) for word in words))


def file_error(folder: Path, text: str) -> str:
    """The error for a file with this content, without the folder's name."""
    (folder / "run.yaml").write_text(text, encoding="utf-8")
    return error_of(folder / "run.yaml").replace(f"{folder}/", "")


def test_errors_stand_in_the_order_of_the_command() -> None:
    words = ("TRAIN.NORMALIZE_TARGET=false", "MODEL.APE=true", "LOCAL_RANK=3", "MODEL.QK_SCALE=2", "MODEL.PATCH_NORM=0")
    lines = error_of(None, *words).splitlines()[1:]
    assert [line.split()[2] for line in lines] == [word.partition("=")[0] for word in words]


def test_all_errors_are_reported_together_with_their_lines(tmp_path: Path) -> None:
    text = (
        "DATA:\n  BATCH_SIZE: 0\n  IMAGESIZE: 224\nTRAIN:\n  BASE_LR: fast\n  OPTIMISER: {NAME: SGD}\nBATCH_SIZE: 3\n"
    )
    lines = file_error(tmp_path, text).splitlines()
    assert lines[0] == "5 settings are wrong:"
    assert sorted(line.strip() for line in lines[1:]) == [
        "run.yaml:2: DATA.BATCH_SIZE: expected whole number >= 1 or auto, got 0.",
        "run.yaml:3: unknown key DATA.IMAGESIZE. Did you mean DATA.IMAGE_SIZE?",
        "run.yaml:5: TRAIN.BASE_LR: expected number >= 0 or auto, got fast.",
        "run.yaml:6: unknown key TRAIN.OPTIMISER. Did you mean TRAIN.OPTIMIZER?",
        "run.yaml:7: unknown key BATCH_SIZE. Did you mean DATA.BATCH_SIZE?",
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "LOG_STYLE: flet\n",
            "run.yaml:1: LOG_STYLE: expected auto, table, paddlevit or fleet, got flet. Did you mean fleet?",
        ),
        ("DATA: {IMAGE_CHANNELS: 0}\n", "run.yaml:1: DATA.IMAGE_CHANNELS: expected whole number >= 1, got 0."),
        ("DATA: {BATCH_SIZE: true}\n", "DATA.BATCH_SIZE: expected whole number >= 1 or auto, got true."),
        ("DATA: {BATCH_SIZE: 2.5}\n", "DATA.BATCH_SIZE: expected whole number >= 1 or auto, got 2.5."),
        (
            "DATA:\n  BATCH_SIZE:\n",
            "2: DATA.BATCH_SIZE: expected whole number >= 1 or auto, got no value; leave the key",
        ),
        ("DATA: {BATCH_SIZE: {A: 1}}\n", "DATA.BATCH_SIZE: expected whole number >= 1 or auto, got {}"),
        ("MODEL: {NUM_HEADS: [3, x]}\n", "expected whole number >= 1, list of whole numbers >= 1 or null, got [3, x]."),
        ("TRAIN: {OPTIMIZER: {BETAS: (0.9)}}\n", "expected list of two numbers >= 0 and < 1 or null, got (0.9)."),
        ("TRAIN: {WEIGHT_DECAY: .nan}\n", "TRAIN.WEIGHT_DECAY: expected number >= 0, got .nan."),
        ("TRAIN: {LINEAR_SCALED_LR: 0.0}\n", "LINEAR_SCALED_LR: expected number > 0, true, false or null, got 0.0."),
        ("AMP: maybe\n", "run.yaml:1: AMP.ENABLED: expected true or false, got maybe."),
        ("TRAIN: 3\n", "run.yaml:1: TRAIN is a section, not a setting. Its keys: LAST_EPOCH, NUM_EPOCHS,"),
        ("data:\n  batch_size: 3\n", "run.yaml:1: unknown key data. Did you mean DATA?"),
        (
            "TRAIN:\n  LR: 3\n",
            "unknown key TRAIN.LR. Did you mean TRAIN.WARMUP_START_LR, TRAIN.BASE_LR, TRAIN.END_LR or",
        ),
        ("mixup: 1\nlr: 1\n", " TRAIN.MIXUP_ALPHA?\n  run.yaml:2: unknown key lr. Did you mean TRAIN.BASE_LR?"),
        ("SEED: 1\nSEED: 2\n", "run.yaml:2: SEED is set twice: run.yaml:1 has another value"),
        ("BASE: a.yaml\nBASE: []\n", "run.yaml:2: BASE is set twice: run.yaml:1 has another value"),
        ("MODEL:\n  DEPTH: 3\n  TRANS: {DEPTH: 4}\n", "run.yaml:3: MODEL.DEPTH is set twice: "),
        ("MODEL: {TRANS: {HYBRID: false}}\n", "run.yaml:1: unknown key MODEL.HYBRID."),
        ("- a\n- b\n", "run.yaml:1: expected `KEY: value` lines"),
        ("SEED: 1\nTAG: [a\n", "run.yaml:3: not valid YAML: expected ',' or ']'"),
        ("[1]: 2\n", "run.yaml:1: a key must be a plain word"),
        ("a: &a {}\n<<: *a\n", "run.yaml:2: a key must be a plain word; instead of `<<`, build on files with BASE"),
        ("USE: [a.py, a.b=1, {a.c: 2}]\n", "run.yaml:1: USE: expected list of names, got [a.py, [], a.b=1]."),
        ("BASE: [gone.yaml]\n", "gone.yaml cannot be read: No such file or directory."),
        (
            "TAG: !!python/object/apply:os.system ['exit 1']\n",
            "run.yaml:1: TAG: expected text of at most 1000 characters or null, got [exit 1].",
        ),
    ],
)
def test_error_in_a_file_is_described(tmp_path: Path, text: str, message: str) -> None:
    assert message in file_error(tmp_path, text)


def test_foreign_type_is_reported_with_its_keys(tmp_path: Path) -> None:
    """A file of a model that vitamp does not build: its keys are no misspelt keys of ours."""
    keys = "MODEL: {TYPE: Sequencer, DEPTH: 24, DEPTH_TOKEN_ONLY: 2, NUM_CLASS: 3}\nTRAIN: {MIXUP: 0.8}\n"
    first, second, last = [line.strip() for line in file_error(tmp_path, keys).splitlines()[1:]]
    assert first == "run.yaml:1: unknown key MODEL.NUM_CLASS. Did you mean MODEL.NUM_CLASSES?"
    assert second == "run.yaml:2: unknown key TRAIN.MIXUP. Did you mean TRAIN.MIXUP_ALPHA?"
    assert last.startswith("run.yaml:1: MODEL.TYPE sequencer is not one of vit, deit, swin, mae, nor has a family of")
    assert last.endswith("and leave out MODEL.TYPE, MODEL.DEPTH_TOKEN_ONLY")
    ours = file_error(tmp_path, keys.replace("Sequencer", "ViT"))
    assert "unknown key MODEL.DEPTH_TOKEN_ONLY. Did you mean MODEL.DEPTH?" in ours


def test_files_are_named_in_errors_whatever_they_are_called(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("TRAIN: {BASE_LRR: 0.1}\n", encoding="utf-8")  # as that of a run
    assert "config.yaml:1: unknown key TRAIN.BASE_LRR. Did you mean" in error_of(tmp_path / "config.yaml")
    (tmp_path / "vit_base.yaml").touch()
    assert error_of(tmp_path / "vit_bse.yaml") == (
        f"{tmp_path}/vit_bse.yaml cannot be read: No such file or directory. Did you mean {tmp_path}/vit_base.yaml?"
    )
    assert "The folder" in error_of(tmp_path / "none/x.yaml")
    assert "Is a directory" in error_of(tmp_path)
    (tmp_path / "binary.yaml").write_bytes(b"TAG: \xb0\xff\n")
    assert "not a YAML text file" in error_of(tmp_path / "binary.yaml")


def test_yaml_bombs_are_refused_at_once(tmp_path: Path) -> None:
    bomb = "a0: &a0 [x]\n" + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 12))
    start = time.process_time()  # of this process: other programs must not make the test fail
    assert "unknown key a11" in file_error(tmp_path, bomb)
    assert "TRAIN.OPTIMIZER.BETAS" in file_error(tmp_path, "TRAIN: {OPTIMIZER: {BETAS: &a [*a]}}\n")
    assert "maximum recursion depth exceeded" in file_error(tmp_path, "[" * 50_000)
    assert "FLIP" in file_error(tmp_path, f"DATA: {{FLIP: '{'(' * 5000}{')' * 5000}'}}\n")
    assert time.process_time() - start < 5


def test_invalid_flag_that_sets_two_keys_is_reported_once() -> None:
    flags = {"DATA.BATCH_SIZE": ("0", "-batch_size"), "DATA.BATCH_SIZE_EVAL": ("0", "-batch_size")}
    said = "-batch_size: DATA.BATCH_SIZE: expected whole number >= 1 or auto, got 0."
    assert refusal(load_config, None, flags) == said


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("DATA.IMAGENET_MEAN=[1,2]", "DATA.IMAGENET_MEAN: [1.0, 2.0] has 2 numbers"),
        ("DATA.IMAGENET_STD=[0.1,0.2,0.3] DATA.IMAGE_CHANNELS=1", "DATA.IMAGENET_STD: [0.1, 0.2, 0.3] has 3"),
        ("DATA.IMAGENET_STD=0", "DATA.IMAGENET_STD: expected list of numbers > 0 or auto, got 0."),
        ("DATA.CROP_SCALE=[0.5,0.2]", "DATA.CROP_SCALE: [0.5, 0.2] must be"),
        ("DATA.CROP_SCALE=[0,1]", "DATA.CROP_SCALE: expected list of two numbers > 0 and <= 1, got [0, 1]."),
        ("DATA.CROP_RATIO=[2,1]", "DATA.CROP_RATIO: [2.0, 1.0] must be"),
        ("AMP.DECR_RATIO=1", "AMP.DECR_RATIO: expected number > 0 and < 1, got 1"),
        ("AMP.DECR_EVERY_N_NAN_OR_INF=0", "AMP.DECR_EVERY_N_NAN_OR_INF: expected whole number >= 1, got 0"),
        ("TRAIN.TOKEN_DROP=1", "TRAIN.TOKEN_DROP: expected number >= 0 and < 1, got 1"),
        (
            f"TRAIN.CUTMIX_MINMAX=[0.5,0.52] {SIZES}=[[0,32],[0.5,64]]",
            "at least one pixel apart (in images of 32 x 32)",
        ),
        (f"{SIZES}=[[0.1,32],[0.5,64]]", "the first start must be 0"),
        (f"{SIZES}=[[0,32],[300,64]]", "below TRAIN.NUM_EPOCHS 300"),
        (f"{SIZES}=[[0,32],[0,64]]", "each later start above the previous one"),
        (f"{SIZES}=[[0,32,64]]", "list of lists of two numbers"),
        ("MAX_TIME=90", "MAX_TIME: expected a time as HH:MM:SS, such as 0:30:00 or null, got 90."),
        ("MAX_TIME=1:60:00", "MAX_TIME: expected a time"),
        ("TRAIN.OPTIMIZER.BETAS=[0.9,1]", "TRAIN.OPTIMIZER.BETAS: expected list of two numbers >= 0 and < 1"),
        ("TRAIN.CUTMIX_MINMAX=[0.8,0.2]", "TRAIN.CUTMIX_MINMAX: [0.8, 0.2] must be the smallest and the largest"),
        ("TRAIN.CUTMIX_MINMAX=[0.2,1.2]", "TRAIN.CUTMIX_MINMAX: expected list of two numbers >= 0 and <= 1"),
        ("TRAIN.CUTMIX_MINMAX=[0.3,0.35] DATA.IMAGE_SIZE=8", "at least one pixel apart (in images of 8 x 8)"),
        ("MODEL.MLP_RATIO=1e308", "MODEL.MLP_RATIO: expected number > 0 and <= 1000 or null, got 1e308."),
        ("MODEL.INIT_VALUES=1e308", "expected number > 0 and <= 1e+06 or null"),
        ("DATA.IMAGENET_MEAN=1e308", "expected list of numbers >= -1e+06 and <= 1e+06"),
        ("TRAIN.WARMUP_EPOCHS=1e308", "TRAIN.WARMUP_EPOCHS: expected number >= 0 and <= 1e+06, got 1e308."),
        ("TRAIN.DISTILLATION_TAU=1e308", "TRAIN.DISTILLATION_TAU: expected number > 0 and <= 1e+06, got 1e308."),
        ("DIST.TIMEOUT=1e308", "DIST.TIMEOUT: expected number > 0 and <= 1e+06, got 1e308."),
        (f"TAG={'x' * 10**6}", f"TAG: expected text of at most 1000 characters or null, got {'x' * 300}...."),
        ("TRAIN.RAND_AUGMENT_MAGNITUDE=11", "RAND_AUGMENT_MAGNITUDE: expected number >= 0 and <= 10, got 11"),
        ("TRAIN.BASELR=1", "command line: unknown key TRAIN.BASELR. Did you mean TRAIN.BASE_LR?"),
        ("BASE_LR=1", "command line: unknown key BASE_LR. Did you mean TRAIN.BASE_LR?"),
        ("NAME=x", "unknown key NAME. Did you mean MODEL.NAME?"),  # the outermost of several
        ("TRAIN=3", "TRAIN is a section"),
        ("BASE=x.yaml", "BASE belongs in a YAML file"),
        ("SEED=x", "command line: SEED: expected whole number, got x."),
    ],
)
def test_conflicting_settings_are_refused(words: str, message: str) -> None:
    error = error_of(None, *words.split())
    assert message in error
    assert error.startswith("command line: ")


def test_conflicts_are_reported_together_with_their_places(tmp_path: Path) -> None:
    text = file_error(tmp_path, "TRAIN: {LAST_EPOCH: 300}\nDATA: {CROP_RATIO: [2, 1]}\n")
    assert text.splitlines()[0] == "2 settings are wrong:"
    assert "  run.yaml:1: TRAIN.LAST_EPOCH: 300 leaves no epoch" in text
    assert "  run.yaml:2: DATA.CROP_RATIO: [2.0, 1.0] must" in text


RULES = [(key, rule) for key, field in settings().items() for rule in rules_of(field)]
FSDP, LABELS, AMP = ["DIST.STRATEGY=fsdp"], ["DATA.MULTI_LABEL=true"], ["AMP.ENABLED=true"]
TEACHER = ["TRAIN.DISTILLATION_TYPE=hard", "TRAIN.TEACHER_MODEL=resnet18"]
MUON = ["TRAIN.OPTIMIZER.NAME=NMuon"]


@pytest.mark.parametrize(
    ("word", "others", "reason"),
    [
        ("DATA.BATCH_SIZE=auto", FSDP, "DIST.STRATEGY fsdp: the search does not support FSDP; give a number"),
        ("DATA.BATCH_SIZE=1", ["TRAIN.MIXUP_ALPHA=0.8"], "TRAIN.MIXUP_ALPHA 0.8: mixup and CutMix mix images"),
        ("DATA.BATCH_SIZE=1", ["TRAIN.CUTMIX_MINMAX=[0.2, 0.8]"], "TRAIN.CUTMIX_MINMAX [0.2, 0.8]: mixup and CutMix"),
        ("DATA.PART=test", [], "needs EVAL=true: training uses val; add -eval"),
        (
            "MODEL.LORA.RANK=8",
            ["MODEL.PRETRAINED=x", "MODEL.FREEZE=[batch_norm, backbone]"],
            "MODEL.FREEZE [batch_norm, backbone]: LoRA freezes all weights but the classifier itself; leave",
        ),
        ("DATA.SAMPLER=balanced", LABELS, "DATA.MULTI_LABEL: an image of one label has others; use TRAIN.CLASS"),
        ("MODEL.RESUME=auto", [], "needs OUTPUT: auto looks in the run's own folder; name it with -output"),
        ("TRAIN.LOSS=ce", LABELS, "DATA.MULTI_LABEL: cross-entropy has one class per image; leave TRAIN.LOSS out"),
        ("TRAIN.CLASS_WEIGHTS=balanced", TEACHER, "TRAIN.DISTILLATION_TYPE hard: its loss has none; use DATA.SAMPLER"),
        ("TRAIN.MODEL_EMA_FORCE_CPU=true", [*FSDP, "TRAIN.MODEL_EMA=true"], "DIST.STRATEGY fsdp: FSDP shards the EMA;"),
        ("TRAIN.AUGMENT=[trivial]", ["TRAIN.AUTO_AUGMENT=true"], "TRAIN.AUTO_AUGMENT: they were never meant"),
        (
            "TRAIN.AUGMENT=[three]",
            ["TRAIN.AUTO_AUGMENT=true", "TRAIN.RAND_AUGMENT=true"],
            "TRAIN.RAND_AUGMENT and TRAIN.AUTO_AUGMENT: they were never meant to be combined; choose one of them",
        ),
        ("TRAIN.DISTILLATION_TYPE=soft", LABELS, "DATA.MULTI_LABEL: its loss is a softmax cross-entropy over the"),
        ("AMP.DTYPE=fp8", [*AMP, *FSDP], "DIST.STRATEGY fsdp: FSDP with fp8 is not supported; use bf16, fp16 or ddp"),
        ("AMP.LEVEL=O3", [*AMP, *FSDP], "DIST.STRATEGY fsdp: FSDP with O3 is not supported; use O1, O2 or NAIVE"),
        ("AMP.AUTO_FP32=true", [*AMP, *FSDP], "DIST.STRATEGY fsdp: updates of FSDP are not replayed; set AMP.FP32"),
        ("DIST.STRATEGY=fsdp", ["DEVICE=mps"], "DEVICE mps: FSDP needs several devices, and MPS is one; leave DIST"),
        ("DIST.HSDP=true", [], "needs DIST.STRATEGY=fsdp: it says how FSDP shards the weights; set DIST.STRATEGY=fsdp"),
    ],
)
def test_broken_rule_is_refused(word: str, others: list[str], reason: str) -> None:
    key, value = word.split("=")
    text = f"command line: {key}: {value} {'' if reason.startswith('needs') else 'is not possible with '}{reason}"
    assert error_of(None, word, *others).startswith(text)


@pytest.mark.parametrize(
    "words",
    [
        ["DATA.IMAGE_CHANNELS=1"],
        ["DATA.IMAGE_CHANNELS=1", "DATA.IMAGENET_MEAN=0.1", "DATA.IMAGENET_STD=0.3"],
        ["DATA.IMAGENET_MEAN=0"],
        ["MODEL.EMBED_DIM=96", "MODEL.NUM_HEADS=[3,6,12,24]"],
        ["MAX_TIME=100:00:00"],
        ["DATA.BATCH_SIZE=3", "TRAIN.MIXUP_ALPHA=0.8", "TRAIN.MIXUP_MODE=pair"],
        ["TRAIN.CUTMIX_MINMAX=[0,1]", "DATA.IMAGE_SIZE=8"],
        ["TRAIN.CUTMIX_MINMAX=[0.2,0.8]", "DATA.IMAGE_SIZE=auto"],
        ["DATA.CROP_SCALE=[1,1]", "DATA.CROP_RATIO=[1,1]"],
        ["TRAIN.NUM_EPOCHS=0", "TRAIN.SIZE_SCHEDULE=[[0,8],[0.75,224]]"],
        ["EVAL=true", "DATA.IMAGE_SIZE=24", "TRAIN.SIZE_SCHEDULE=[[0,8],[0.75,16]]"],
        ["DATA.BATCH_SIZE=1", "TRAIN.MIXUP_ALPHA=0.8", "EVAL=true"],
        ["DATA.PART=test", "EVAL=true"],
        ["DATA.PART=val"],
        ["MODEL.LORA.RANK=8", "MODEL.PRETRAINED=x", "MODEL.FREEZE=batch_norm"],
        ["MODEL.RESUME=auto", "OUTPUT=there"],
        ["TRAIN.CLASS_WEIGHTS=balanced", *TEACHER, "EVAL=true"],
        [*LABELS, *TEACHER, "EVAL=true"],
        ["TRAIN.RAND_AUGMENT=true", "TRAIN.AUTO_AUGMENT=true"],
        ["AMP.DTYPE=fp8", *FSDP],
        ["AMP.LEVEL=O2", *AMP, *FSDP],
    ],
)
def test_unbroken_rule_is_silent(words: list[str]) -> None:
    load(None, *words)


@pytest.mark.parametrize(
    ("word", "others", "reason"),
    [
        ("DATA.VAL_FRACTION=0.3", ["DATA.FOLD=2/5"], "with DATA.FOLD 2/5: its fold is the validation split"),
        ("MODEL.PRETRAINED=a", ["MODEL.RESUME=/no/run"], "with MODEL.RESUME /no/run: the run's own weights are loaded"),
        ("MODEL.NEW_CLASSIFIER=true", [], ": MODEL.PRETRAINED is null; without weights to start from, every"),
        ("TRAIN.BCE_TARGET_THRESH=0.2", [], ": TRAIN.LOSS is ce, not bce"),
        ("TRAIN.MIXUP_ALPHA=0.8", ["TRAIN.MIXUP_PROB=0"], ": TRAIN.MIXUP_PROB is 0.0"),
        ("TRAIN.MIXUP_PROB=0.8", [], ": TRAIN.MIXUP_ALPHA is 0.0 and TRAIN.CUTMIX_ALPHA is 0.0"),
        ("DATA.CROP_SCALE=[0.1, 1]", ["DATA.CROP=pad"], ": DATA.CROP is pad, not random"),
        ("DATA.CROP_PCT=0.9", ["DATA.CROP=none"], "with DATA.CROP none"),
        ("TRAIN.END_LR=0.1", ["TRAIN.LR_SCHEDULER.NAME=step"], "with TRAIN.LR_SCHEDULER.NAME step"),
        ("TRAIN.OPTIMIZER.MOMENTUM=0.9", [], "with TRAIN.OPTIMIZER.NAME AdamW"),
        ("TRAIN.MODEL_EMA_DECAY=0.9", [], ": TRAIN.MODEL_EMA is false"),
        ("TRAIN.LR_SCHEDULER.DECAY_RATE=0.2", [], ": TRAIN.LR_SCHEDULER.NAME is warmupcosine, not step or multi-step"),
        ("TRAIN.RANDOM_ERASE_COUNT=3", [], ": TRAIN.RANDOM_ERASE_PROB is 0.0"),
        ("TRAIN.MIXUP_MODE=elem", [], ": TRAIN.MIXUP_ALPHA is 0.0 and TRAIN.CUTMIX_ALPHA is 0.0"),
        ("DATA.AFFINE_PROB=0.5", [], ": DATA.SHIFT is 0.0 and DATA.ZOOM is 0.0 and DATA.ROTATE is 0.0"),
        ("TRAIN.OPTIMIZER.BETAS=[0.9, 0.95]", ["TRAIN.OPTIMIZER.NAME=SGD"], "with TRAIN.OPTIMIZER.NAME SGD"),
        ("TRAIN.COLOR_JITTER=0.4", ["TRAIN.AUGMENT=trivial"], "with TRAIN.AUGMENT"),
        ("TRAIN.AUTO_AUGMENT=true", ["TRAIN.RAND_AUGMENT=true"], "with TRAIN.RAND_AUGMENT"),
        ("AMP.LEVEL=O2", [], ": AMP.ENABLED is false; -amp turns AMP on"),
        ("AMP.DTYPE=fp8", FSDP, ": AMP.ENABLED is false"),
    ],
)
def test_setting_without_effect_is_noted(word: str, others: list[str], reason: str) -> None:
    text = f"command line: {word.partition('=')[0]} has no effect{reason if reason[0] == ':' else f' {reason}'}"
    assert next(note for note in load(None, word, *others).notes if "effect" in note).startswith(text)


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["AMP.TF32=true"],
        ["AMP.LEVEL=O1"],
        ["MODEL.NEW_CLASSIFIER=true", "MODEL.PRETRAINED=a run"],
        ["MODEL.PRETRAINED=a", "MODEL.RESUME=auto", "OUTPUT=/no"],
        ["TRAIN.COLOR_JITTER=0.4", "TRAIN.AUGMENT=three"],
        ["TRAIN.MIXUP_PROB=0"],
    ],
)
def test_setting_with_effect_is_not_noted(words: list[str]) -> None:
    assert [note for note in load(None, *words).notes if "no effect" in note] == []


def test_rules_name_settings_that_exist_and_say_why() -> None:
    wrong = []
    for key, rule in RULES:
        if rule.is_error and not rule.why:
            wrong.append(f"{key}: no reason")
        named = [f"{key}={rule.at}", *rule.others, *[rule.when] * bool(rule.when)]
        for name, _, values in (text.replace("!", "").partition("=") for text in named):
            words = allowed(name) if name in settings() else None
            if words is None or (" or " in words and not any(kind in words for kind in ("text", "number"))):
                wrong += [f"{key}: {name}={value}" for value in values.split("|") if value not in (words or "")]
    assert wrong == []
