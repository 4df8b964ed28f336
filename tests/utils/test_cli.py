"""The command line: flags, KEY=VALUE words, -h, -version, and errors for mistakes."""

from pathlib import Path
from typing import Any

import pytest

from tests.program import ROOT
from tests.refused import refusal
from utils.cli import CommandLine, Parser, entry_parser, parse
from utils.config import Config, load_config
from utils.config.keys import settings
from utils.config.schema import DistConfig
from utils.errors import UserError
from utils.flags import FLAGS, Flag, Positional

APEX_LISTS = {"CUSTOM_WHITE_LIST": (), "CUSTOM_BLACK_LIST": ("gelu", "layer_norm", "softmax")}


def read(line: str) -> CommandLine:
    return parse(line.split(), "main.py")


def values(line: str) -> dict[str, Any]:
    return {key: value for key, (value, _) in read(line).flags.items()}


def error_of(line: str) -> str:
    return refusal(read, line)


@pytest.mark.parametrize("line", ["--batch_size_eval 3", "-batch-size-eval=3", "--batch-size_eval 3"])
def test_all_spellings_of_a_flag_are_equivalent(line: str) -> None:
    assert read(line).flags == {"DATA.BATCH_SIZE_EVAL": ("3", "-batch_size_eval")}


def test_each_flag_sets_its_setting() -> None:
    line = (
        "-output o -save_freq 2 -log_freq 3 -validate_freq 4 -num_workers 0 -resume r -last_epoch 5 -ngpus -1 "
        "-device cpu -backend gloo -host h -port 1234 -rank 0 -world_size 2 -threads 2 -max_time 01:00:00 -profile 6 "
        "-image_size 32 -accum_iter 7 -num_classes 10 -pretrained p -eval -data_path d -dataset digits "
        "-batch_size 8 -batch_size_eval 9"
    )
    config = load_config(None, read(line).flags).config
    assert (config.OUTPUT, config.SAVE_FREQ, config.REPORT_FREQ, config.VALIDATE_FREQ) == ("o", 2, 3, 4)
    assert (config.NGPUS, config.DEVICE, config.THREADS, config.PROFILE) == (-1, "cpu", 2, 6)
    assert config.MAX_TIME == "01:00:00"
    assert read(line).ranks == {"host": "h", "port": 1234, "rank": 0, "world_size": 2}
    assert DistConfig(BACKEND="gloo") == config.DIST
    assert (config.TRAIN.LAST_EPOCH, config.TRAIN.ACCUM_ITER, config.EVAL) == (5, 7, True)
    assert (config.MODEL.RESUME, config.MODEL.NUM_CLASSES, config.MODEL.PRETRAINED) == ("r", 10, "p")
    data = config.DATA
    assert (data.DATA_PATH, data.DATASET, data.IMAGE_SIZE, data.NUM_WORKERS) == ("d", "digits", 32, 0)
    assert (data.BATCH_SIZE, data.BATCH_SIZE_EVAL) == (8, 9)


def test_flags_set_existing_settings() -> None:
    assert [key for group in FLAGS.values() for flag in group for key in flag.keys if key not in settings()] == []


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("-amp", {"ENABLED": True}),
        ("-amp auto", {"ENABLED": True, "DTYPE": "auto"}),
        ("-amp BF16", {"ENABLED": True, "DTYPE": "bf16"}),
        ("--amp=fp16", {"ENABLED": True, "DTYPE": "fp16"}),
        ("-amp o2", {"ENABLED": True, "LEVEL": "O2"}),
        ("-amp naive", {"ENABLED": True, "LEVEL": "NAIVE"}),
        ("-amp off", {"ENABLED": False}),
        ("-amp No", {"ENABLED": False}),
        ("-amp on", {"ENABLED": True}),
        ("-amp true", {"ENABLED": True}),
        ("-amp False", {"ENABLED": False}),
        ("-amp O0", {"ENABLED": False}),
        ("-amp torch", {"ENABLED": True, "DTYPE": "auto", "LEVEL": "O1"}),
        ("-amp naive-FP16", {"ENABLED": True, "DTYPE": "fp16", "LEVEL": "NAIVE"}),
        ("-amp=O2-bf16", {"ENABLED": True, "DTYPE": "bf16", "LEVEL": "O2"}),
        ("-amp fp32", {"ENABLED": False, "TF32": False}),
        ("-amp apex", {"ENABLED": True, "DTYPE": "auto", "LEVEL": "O1", **APEX_LISTS}),
        ("-amp fp16 -amp off", {"ENABLED": False, "DTYPE": "fp16"}),
    ],
)
def test_amp_sets_its_settings(line: str, expected: dict[str, Any]) -> None:
    assert values(line) == {f"AMP.{key}": value for key, value in expected.items()}
    load_config(None, read(line).flags)


def test_amp_takes_only_its_own_values() -> None:
    line = read("-amp TRAIN.SEED=1 -amp -eval")
    assert (line.words, line.flags["EVAL"]) == ({"TRAIN.SEED": "1"}, (True, "-eval"))


def test_key_value_words_may_be_anywhere_and_flag_values_are_none() -> None:
    line = read("SEED=1 -output A=B TRAIN.BASE_LR=1e-4 -eval TAG=a=b AMP.ENABLED=")
    assert line.words == {"SEED": "1", "TRAIN.BASE_LR": "1e-4", "TAG": "a=b", "AMP.ENABLED": ""}
    assert line.flags["OUTPUT"] == ("A=B", "-output")
    assert parse(["TAG=two words\n"], "main.py").words == {"TAG": "two words\n"}


@pytest.mark.parametrize(
    ("line", "action", "pattern"),
    [
        ("-dry_run", "dry_run", None),
        ("--print-config", "print_config", None),
        ("-list_models", "list_models", None),
        ("-list_models vit_*", "list_models", "vit_*"),
        ("-list_models SEED=1", "list_models", None),
        ("-version", "version", None),
    ],
)
def test_action_flags_give_action_and_pattern(line: str, action: str, pattern: str | None) -> None:
    assert (read(line).action, read(line).pattern) == (action, pattern)


@pytest.mark.parametrize("line", ["--local-rank=1", "--local_rank 1", "-local_rank=0"])
def test_local_rank_of_launchers_is_ignored(line: str) -> None:
    assert read(line) == CommandLine()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("-outptu x", "-outptu. Did you mean -output? -h lists all flags, docs/migrating.md those of other programs."),
        ("-output", "-output needs a value: -output DIR"),
        ("-output=", "-output needs a value: -output DIR"),
        ("-output -amp", "-output needs a value: -output DIR"),
        ("-output TRAIN.NUM_EPOCHS=5", "-output needs a value: -output DIR"),  # of an empty shell variable
        ("-eval=yes", "-eval takes no value; leave out '=yes'"),
        ("-eval yes", "unrecognised argument 'yes'. -eval takes no value."),
        ("-amp fp61", "unrecognised argument 'fp61'. Did you mean fp16? -amp alone turns AMP on"),
        ("-amp=none", "none: -amp alone turns AMP on; its values are auto"),
        ("--max-epochs=5", "unknown flag --max-epochs. Did you mean -epochs?"),
        ("-lr -amp", "-lr needs a value: -lr RATE"),
        ("-blr 1e-3", "Did you mean TRAIN.BASE_LR=1e-3 and TRAIN.LINEAR_SCALED_LR=256?"),  # unlike -lr
        ("-sched -amp", "unknown flag -sched. Did you mean TRAIN.LR_SCHEDULER.NAME=...?"),
        ("--mean 0.4 0.5 0.6 -amp", "Did you mean DATA.IMAGENET_MEAN=0.4,0.5,0.6?"),
        ("--amp --amp-dtype bfloat16", "unknown flag --amp-dtype. Did you mean -amp bf16?"),
        ("--patch-size 3", "unknown flag --patch-size. Did you mean MODEL.PATCH_SIZE=3?"),  # not -batch_size
        ("--recount 3", "unknown flag --recount. Did you mean TRAIN.RANDOM_ERASE_COUNT=3?"),
        ("--aa originalr-mstd0.5", "Did you mean TRAIN.AUTO_AUGMENT=true?"),
        ("--aa v0r-mstd0.5", "unknown flag --aa. Not available here: ours are in docs/augmentation.md."),
        ("configs/x.yaml", "Did you mean -cfg configs/x.yaml?"),
        ("amp", "Did you mean -amp?"),
        ("batch_size=3", "Did you mean -batch_size=3?"),
        ("train.base_lr=3", "Did you mean TRAIN.BASE_LR=3?"),
        ("why", "unrecognised argument 'why'. Arguments have the form -flag value or KEY=VALUE"),
        ("-batch 8", "unknown flag -batch. Did you mean -batch_size?"),  # no abbreviations
        ("--am", "unknown flag --am."),
        ("-amp=", "-amp=: "),
        ("-amp -1", "unrecognised argument '-1'. -amp alone"),
        ("-list_models a b", "unrecognised argument 'b'."),
        ("A..Z=3", "unrecognised argument 'A..Z=3'. Settings have the form KEY=VALUE"),
        ("--device 0,1", "-device 0,1: takes cpu, cuda or mps; for these GPUs, write CUDA_VISIBLE_DEVICES=0,1 before"),
        ("--device cuda:1", "CUDA_VISIBLE_DEVICES=1 before the command"),
        ("-dry_run -print_config", "-dry_run and -print_config exclude each other"),
    ],
)
def test_mistake_gets_a_suggestion(line: str, message: str) -> None:
    assert message in error_of(line)


def test_a_run_as_an_argument_gets_the_commands_that_read_one(tmp_path: Path) -> None:
    (tmp_path / "run.json").touch()
    assert f"It is a run: training takes it as -resume {tmp_path}, `python " in error_of(f"{tmp_path}")


def test_a_word_that_is_a_folder_is_the_data_path(tmp_path: Path) -> None:
    line = read(f"-amp {tmp_path} SEED=1")
    assert line.flags["DATA.DATA_PATH"] == (str(tmp_path), "-data_path")
    assert (line.words, line.flags["AMP.ENABLED"]) == ({"SEED": "1"}, (True, "-amp"))
    assert read(f"-output {tmp_path}").flags == {"OUTPUT": (str(tmp_path), "-output")}
    for other in (f"{tmp_path.parent}", "-data_path x", "DATA.DATA_PATH=x"):
        named = other.replace(" x", "=x").removesuffix("=x" if other[0] == "D" else " ")
        assert f"{tmp_path} and {named} name the data more than once" in error_of(f"{tmp_path} {other}")
    (tmp_path / "table.csv").touch()
    assert f"Did you mean -data_path {tmp_path}/table.csv?" in error_of(f"{tmp_path}/table.csv")
    assert "Did you mean -data_path" not in error_of(f"{tmp_path}/nothing")


def test_unknown_flags_of_a_timm_command_are_reported_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # where no name is similar to a word of the command
    line = "/data/in1k --model vit_tiny_patch16_224 --opt adamw --lr 1e-3 --aa rand-m9-mstd0.5-inc1 --model-ema"
    assert error_of(f"{line} --drop-path 0.1 data/b --sched cosine -amp").splitlines() == [
        "7 unknown arguments; -h lists all flags, docs/migrating.md those of other programs:",
        "  unrecognised argument '/data/in1k'. There is no such file or folder for -data_path.",
        "  unrecognised argument 'data/b'. There is no such file or folder for -data_path.",
        "  --opt. Did you mean TRAIN.OPTIMIZER.NAME=adamw?",
        "  --aa. Did you mean TRAIN.RAND_AUGMENT=true?",
        "  --model-ema. Did you mean TRAIN.MODEL_EMA=true?",
        "  --drop-path. Did you mean MODEL.DROPPATH=0.1?",
        "  --sched. Did you mean TRAIN.LR_SCHEDULER.NAME=cosine?",
    ]


def test_lr_is_used_unscaled_unless_a_scale_is_given() -> None:
    line = read("-model vit_tiny_patch16_224 -epochs 3 -lr 1e-4 -weight_decay 0.1 -seed 7")
    recipe = str(ROOT / "configs" / "vit_base_patch16_224.yaml")
    config = load_config(recipe, line.flags, line.words).config
    assert (config.TRAIN.BASE_LR, config.TRAIN.LINEAR_SCALED_LR) == (1e-4, None)
    assert (config.TRAIN.NUM_EPOCHS, config.TRAIN.WEIGHT_DECAY, config.SEED) == (3, 0.1, 7)
    assert config.MODEL.NAME == "vit_tiny_patch16_224"
    assert load_config(recipe).config.TRAIN.LINEAR_SCALED_LR == 4096
    both = read("-lr 1e-4 TRAIN.LINEAR_SCALED_LR=512")
    assert load_config(recipe, both.flags, both.words).config.TRAIN.LINEAR_SCALED_LR == 512


def test_help_lists_every_flag_and_exits_with_0(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        read("-amp -h")
    assert left.value.code == 0
    shown = capsys.readouterr().out
    assert shown == entry_parser("main.py").format_help()
    for group, flags in FLAGS.items():
        assert f"\n{group}:\n" in shown
        assert all(f"\n  -{flag.name}" in shown for flag in flags)
    assert max(map(len, shown.splitlines())) <= 100


def test_examples_in_help_are_valid() -> None:
    lines = [line.split() for line in entry_parser("main.py").format_help().splitlines() if line.startswith("  python")]
    assert len(lines) == 5
    for _, program, *argv in lines:
        line = parse(argv, program)
        assert line.cfg is not None or "MODEL.RESUME" in line.flags
        cfg = str(ROOT / line.cfg) if line.cfg else None
        assert isinstance(load_config(cfg, line.flags, line.words).config, Config)


@pytest.mark.parametrize(
    ("line", "key", "value"),
    [
        ("-ngpus -1", "NGPUS", "-1"),
        ("-batch_size_eval -8", "DATA.BATCH_SIZE_EVAL", "-8"),
        ("-output=SEED=1", "OUTPUT", "SEED=1"),
        ("-output A=B=C", "OUTPUT", "A=B=C"),
        ("-teacher_model_path x=y.z", "TRAIN.TEACHER_MODEL", "x=y.z"),
        ("-pretrained x -pretrained y", "MODEL.PRETRAINED", "y"),
        ("-batch_size 64 -batch_size_eval 8 -batch_size 32", "DATA.BATCH_SIZE_EVAL", "8"),
        ("-batch_size_eval 8 -batch_size 64 -batch_size 32", "DATA.BATCH_SIZE_EVAL", "8"),
        ("-batch_size 64 -batch_size 32", "DATA.BATCH_SIZE_EVAL", "32"),
    ],
)
def test_values_like_flags_or_words_are_read_as_values_and_the_last_one_counts(line: str, key: str, value: str) -> None:
    batch = {"DATA.BATCH_SIZE": "32"} if "-batch_size " in line else {}
    assert values(line) == {key: value, **batch}


def test_help_shows_defaults() -> None:
    shown = " ".join(entry_parser("main.py").format_help().split())
    size = "-image_size PIXELS|HEIGHT,WIDTH|auto side of the model's input, or height and width (default: 224)"
    assert size in shown
    assert "-num_workers N loading processes per rank (default: depends on the number of cores)" in shown
    assert "(default: ())" not in shown
    written_by_hand = [flag.name for group in FLAGS.values() for flag in group if "default" in flag.about]
    assert not written_by_hand, "defaults belong in Flag.default_text"


def test_choices_and_positional_words_of_a_tool() -> None:
    flags = (Flag("format", "how to print", "FORMAT", choices=("table", "json")),)
    parser = Parser("tool.py", "A tool.", {"Flags": flags}, positionals=(Positional("files", "FILE", "files", "*"),))
    with pytest.raises(UserError, match=r"-format jsn: takes table or json\. Did you mean json\?"):
        parser.read(["-format", "jsn"])
    given, words = parser.read(["-format", "json", "--", "-format", "A=b"])
    assert (given["format"], given["files"], words) == ("json", ["-format", "A=b"], {})
