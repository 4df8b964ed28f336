"""Flags of other programs, as unknown flags, get the suggestion of utils/foreign_flags.py."""

import re

import pytest
import timm
import torchvision
from pydantic import ValidationError

from models.refusals import similar_models
from tests.lint import for_each
from tests.program import ROOT, Vitamp
from utils.cli import Parser, parse
from utils.config import Config, load_config
from utils.config.keys import nested, settings
from utils.config.paddlevit import FIXED as OF_PADDLEVIT
from utils.errors import UserError
from utils.flags import BY_NAME, FLAGS
from utils.foreign_flags import ABSENT, ANY_VALUE, GONE, INSTEAD, MODELS

OF_TIMM_AND_TORCHVISION = """
c config data-dir dataset train-split val-split train-num-samples val-num-samples dataset-download class-map
input-img-mode input-key target-key dataset-trust-remote-code model pretrained pretrained-path
initial-checkpoint resume no-resume-opt num-classes gp img-size in-chans input-size crop-pct mean std
interpolation b batch-size vb validation-batch-size channels-last fuser grad-accum-steps grad-checkpointing
fast-norm model-kwargs head-init-scale head-init-bias torchcompile-mode torchscript torchcompile device amp
amp-dtype model-dtype no-ddp-bb synchronize-step local_rank device-modules opt opt-eps opt-betas momentum
weight-decay clip-grad clip-mode layer-decay layer-decay-min-scale layer-decay-no-opt-scale opt-kwargs sched
sched-on-updates lr lr-base lr-base-size lr-base-scale lr-noise lr-noise-pct lr-noise-std lr-cycle-mul
lr-cycle-decay lr-cycle-limit lr-k-decay warmup-lr min-lr epochs epoch-repeats start-epoch decay-milestones
decay-epochs warmup-epochs warmup-prefix cooldown-epochs patience-epochs decay-rate dr no-aug train-crop-mode
scale ratio hflip vflip color-jitter color-jitter-prob grayscale-prob gaussian-blur-prob aa aug-repeats
aug-splits jsd-loss bce-loss bce-sum bce-target-thresh bce-pos-weight reprob remode recount resplit mixup cutmix
cutmix-minmax mixup-prob mixup-switch-prob mixup-mode mixup-off-epoch smoothing train-interpolation drop
drop-connect drop-path drop-block bn-momentum bn-eps sync-bn dist-bn split-bn model-ema model-ema-force-cpu
model-ema-decay model-ema-warmup seed worker-seeding log-interval val-interval recovery-interval checkpoint-hist
j workers save-images pin-mem no-prefetcher output experiment eval-metric tta use-multi-epochs-loader log-wandb
wandb-project wandb-tags wandb-resume-id train-img-sizes train-batch-sizes train-size-probs train-size-schedule
train-size-schedule-spread train-size-random-mix train-batches-per-epoch train-steps-per-epoch
variable-batch-loss-scale naflex-loader naflex-train-seq-lens naflex-max-seq-len naflex-patch-sizes
naflex-patch-size-probs naflex-loss-scale naflex-patchify-channels-first kd-model-name kd-distill-type
kd-loss-type distill-loss-weight task-loss-weight kd-temperature kd-student-feature-dim kd-teacher-feature-dim
kd-token-distill-type data-path wd norm-weight-decay bias-weight-decay transformer-embedding-decay
label-smoothing mixup-alpha cutmix-alpha lr-scheduler lr-warmup-epochs lr-warmup-method lr-warmup-decay
lr-step-size lr-gamma lr-min print-freq output-dir cache-dataset test-only auto-augment ra-magnitude
augmix-severity random-erase world-size dist-url model-ema-steps use-deterministic-algorithms val-resize-size
val-crop-size train-crop-size clip-grad-norm ra-sampler ra-reps weights backend use-v2
post-training-quantize
"""
"""All flags of timm's train.py (353356e, August 2026), and by hand those of torchvision's references (0.16)"""


def error_of(*argv: str, **tool: object) -> str:
    with pytest.raises(UserError) as caught:
        parse(argv, "main_single_gpu.py") if not tool else Parser("x.py", "", FLAGS, **tool).read(argv)  # type: ignore[arg-type]
    return str(caught.value)


OF_TOOLS = ("-to",)
"""Flags that the entry scripts lack"""


@for_each([(flag, ours) for ours, flags in INSTEAD.items() for flag in flags if ours not in OF_TOOLS])
def test_flag_of_another_program_gets_our_flag_or_setting(both: tuple[str, str]) -> None:
    (name, *own_value), ours = both[0].split(), both[1].partition(" and ")[0]
    assert name not in BY_NAME
    for value in own_value or ["", "0.5", "8", "true", "0.1 0.2", "strange"]:
        message = error_of(f"-{name}", *value.split())
        assert message.startswith(f"unknown flag -{name}. Did you mean ")
        assert ours in message
        if not ours.startswith("-") and "=" not in ours and value:
            assert f"{ours}={value.replace(' ', ',')}" in message or f"{ours}=..." in message


@for_each([(flag, why) for why, flags in ABSENT.items() for flag in flags])
def test_flag_without_an_equivalent_says_why(both: tuple[str, str]) -> None:
    assert both[1][1:] in error_of(*f"--{both[0]}".split())


@for_each([ours for ours in INSTEAD if ours not in OF_TOOLS])
def test_what_is_suggested_is_accepted(ours: str) -> None:
    """Flags exist, keys exist, and values are valid."""
    ours, _, besides = ours.partition(" and ")
    assert {*re.findall(r"[A-Z_]+\.[A-Z_.]+", besides)} <= settings().keys()
    if ours.startswith("-"):
        words = ours.split()
        assert words[0].removeprefix("-") in BY_NAME
        if len(words) > 1:
            parse(words, "main_single_gpu.py")
    else:
        key, _, value = ours.partition("=")
        assert key in settings()
        if value and value != ANY_VALUE:
            load_config(words={key: value})


def test_flags_on_the_page_are_known() -> None:
    page = (ROOT / "docs" / "migrating.md").read_text(encoding="utf-8")
    first = [line.split("|")[1] for line in page.splitlines() if line.startswith("| `-")]
    flags = [flag for cell in first for flag in re.findall(r"`-+([\w-]+)(?: \w+)?`", cell)]
    assert len(flags) > 40
    ours = re.findall(r"`-(\w+)", " ".join(re.findall(r"^\| `.+? \| (.*?) \|", page, re.MULTILINE)))
    assert [flag for flag in ours if flag not in BY_NAME] == [], "of the second column"
    for flag in (name.replace("-", "_") for name in flags):
        assert flag in BY_NAME or re.search("Did you mean|Not ", error_of(f"-{flag}")), flag


@for_each(OF_TIMM_AND_TORCHVISION.split())
def test_every_flag_of_timm_and_torchvision_is_taken_or_explained(flag: str) -> None:
    if flag not in ("amp", "local_rank"):
        assert re.search(r" Did you mean| Not |-\w+ needs a value", error_of(f"--{flag}")), flag


def test_what_is_gone_says_so_in_place_of_a_similar_name() -> None:
    page = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    cells = [line.split("|")[1] for line in page.partition("| gone |")[2].partition("\n\n")[0].splitlines()]
    keys = [key for cell in cells for key in re.findall(r"`([A-Z][A-Z_]+(?:\.[A-Z_]+)+)`", cell)]
    keys = [key for key in keys if key not in {*settings(), *OF_PADDLEVIT, "MODEL.MLP_DIM"}]  # whose hint is MLP_RATIO
    assert len(keys) > 30
    for key in (*keys, *(name for names in GONE.values() for name in names if name.isupper())):
        with pytest.raises(UserError, match=rf"unknown key {key}\. It is gone: "):
            load_config(words={key: "x"})


def test_flags_and_values_of_tools_that_are_gone_say_so(vitamp: Vitamp) -> None:
    for words in ("evaluate.py x -average last:3", "evaluate.py x -weights both", "predict.py x y -tta crops"):
        tool, *rest = words.split()
        assert " It is gone: " in vitamp(*rest, script=f"scripts/{tool}", code=2).err


def test_format_of_an_export_is_to(vitamp: Vitamp) -> None:
    said = vitamp("x", "-format", "onnx", script="scripts/export.py", code=2).err
    assert "unknown flag -format. Did you mean -to?" in said


def test_models_of_torchvision_are_those_of_timm() -> None:
    for theirs, ours in MODELS.items():
        assert theirs in torchvision.models.list_models(), theirs
        assert theirs not in timm.list_models(), theirs
        assert similar_models(theirs) == f" Did you mean {ours}, which torchvision calls so?"
        assert ours in timm.list_models(), ours
    for theirs in ("vit_b_16", "swin_v2_t", "mobilenet_v3_small"):  # but for tables of positions, the same weights
        there = sum(weight.numel() for weight in torchvision.models.get_model(theirs).parameters())
        here = sum(weight.numel() for weight in timm.create_model(MODELS[theirs]).parameters())
        assert abs(here / there - 1) < 1e-3, theirs


@pytest.mark.parametrize("value", ["True", "true", "False"])
def test_flags_that_take_a_value_are_no_switches(vitamp: Vitamp, value: str) -> None:
    for name in ("pretrained", "resume"):
        for word in (f"-{name}={value}", f"{name}={value}"):
            assert f"-{name} needs a value: -{name} " in vitamp("-cfg", "vit_digits", word, code=2).err
    assert f"Did you mean -model={value}x?" in error_of(f"model={value}x")
    assert "Did you mean -eval? " in f"{error_of(f'eval={value}')} "


@pytest.mark.parametrize(
    ("word", "advice"),
    [
        ("val=True", "Not needed: each epoch is validated (-validate_freq N: every Nth); -eval validates once."),
        ("flipud=0.5", "Did you mean DATA.VERTICAL_FLIP=0.5?"),
        ("precision=16-mixed", "Did you mean -amp fp16?"),
        ("name=b", "Did you mean -output?"),
        ("data=x", "Did you mean -data_path?"),
        ("momentun=0.8", "Did you mean TRAIN.OPTIMIZER.MOMENTUM=0.8?"),
        ("box=7.5", "Settings have the form KEY=VALUE"),
        ("trainer.max_epochs=3", "needs its file: -use FILE. Did you mean -epochs?"),
        ("optimizer.lr=3", "needs its file: -use FILE. Did you mean -lr?"),
        ("--trainer.max_epochs=3", "unknown flag --trainer.max_epochs. Did you mean -epochs?"),
        ("--trainer.epochs=3", "unknown flag --trainer.epochs. Did you mean -epochs?"),
        ("--data.batch_size=8", "unknown flag --data.batch_size. Did you mean DATA.BATCH_SIZE=8?"),
        ("device=0", "'device=0'. -device 0: takes cpu, cuda or mps; for these GPUs, write CUDA_VISIBLE_DEVICES=0"),
        ("task=classify", "Not needed: this program classifies images."),
        ("out=x", "Did you mean -output?"),
        ("method=dino", "-mae_pretrain learns without labels"),
        ("steps=90", "Did you mean TRAIN.MAX_UPDATES=90?"),
        ("overwrite=True", "Not available here: no run is overwritten"),
        ("model_args={}", "Not available here: each setting has its own key"),
    ],
)
def test_words_of_other_programs_get_the_right_hint_or_none(vitamp: Vitamp, word: str, advice: str) -> None:
    assert advice in vitamp("-cfg", "vit_digits", word, code=2).err


def test_value_of_the_other_program_is_suggested_only_if_it_is_valid_here() -> None:
    with pytest.raises(ValidationError):
        Config.model_validate(nested({"DATA.INTERPOLATION": "random"}))
    assert "DATA.INTERPOLATION=bilinear?" in error_of("--interpolation", "bilinear")
    assert "DATA.INTERPOLATION=...?" in error_of("--interpolation", "random")
    assert "TRAIN.MIXUP_PROB=0.5?" in error_of("--mixup-prob", "0.5")
    assert "TRAIN.OPTIMIZER.NAME=nesterov or TRAIN.OPTIMIZER.NAME=SGD? " in error_of("--opt", "sgd")
    assert "TRAIN.WARMUP_START_LR=...?" in error_of("--lr-warmup-decay", "0.01"), "there a factor"
    assert "MODEL.POOL=mean? " in error_of("--gp", "avg")
    assert "EMA_DECAY=...?" in error_of("--model-ema-decay", "0.99998"), "which torchvision scales by the batch"


def test_flag_for_amp_keeps_its_value_and_no_flag_leads_to_executed_files(vitamp: Vitamp) -> None:
    words = ("--use-amp", "no", "-a", "yes", "--use_ema", "-multi_scale_sampler_ddp")
    assert vitamp("-cfg", "vit_digits", *words, code=2).err.splitlines()[1:] == [
        "  --use-amp. Did you mean -amp no?",
        "  -a. Did you mean -amp yes?",
        "  --use_ema.",
        "  -multi_scale_sampler_ddp. Not available here: all images of an epoch have one size (TRAIN.SIZE_SCHEDULE).",
    ]
    assert "-model?" in error_of("-a", "resnet50")


def test_tool_without_settings_suggests_none() -> None:
    assert "TRAIN.SMOOTHING=0.1" in error_of("--label-smoothing", "0.1", settings=True)
    assert "TRAIN.SMOOTHING" not in error_of("--label-smoothing", "0.1", settings=False)
    assert "MODEL.DEPTH" not in error_of("-depth", "3", settings=False)
