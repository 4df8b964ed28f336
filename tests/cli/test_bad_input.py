"""Bad input is refused before the first update: exit code 2, one clear message, no files."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.program import ROOT, Result, Vitamp, save_image


@pytest.fixture
def refuses(vitamp: Vitamp, tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Vitamp:
    """Run the tiny recipe with `words` in an empty folder; it must be refused in one error with all of `said`."""
    here = tmp_path_factory.mktemp("here")

    def call(*words: object, said: tuple[str, ...], **options: object) -> Result:
        result = vitamp("-cfg", tiny, *words, cwd=here, code=2, **options)
        assert result.err.count("error:") == 1, result.err
        assert [part for part in said if part not in " ".join(result.err.split())] == [], result.err
        assert list(here.iterdir()) == [], "a refused run left something behind"
        return result

    return call


def test_too_few_open_files_are_refused(tiny: Path) -> None:
    command = f"ulimit -n 20 && {sys.executable} main_single_gpu.py -cfg {tiny}"
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr.count("error: ulimit -n is 20;")) == (2, 1), done.stderr


@pytest.mark.parametrize("script", ["main_single_gpu.py", "main_multi_gpu.py"])
def test_a_bare_command_is_answered_with_three_commands(vitamp: Vitamp, tmp_path: Path, script: str) -> None:
    first, *lines = vitamp(script=script, code=2).err.splitlines()
    assert first == "error: nothing to train is named."
    commands = dict(line.strip().split(":", 1) for line in lines)
    assert list(commands) == ["quickstart", "own images", "all flags"]
    for number in range(4):
        save_image(tmp_path / f"{number % 2}" / f"{number}.jpg", number)
    for command in commands.values():
        python, name, *words = command.replace("DIR", f"{tmp_path}").split()
        assert (python, name) == ("python", script)
        result = vitamp(*words, "-print_config", script=script, code=0)
        if str(tmp_path) in words:
            assert f"DATA_PATH: {tmp_path} " in result.out


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("main_single_gpu.py", ("-cfg", "vit_digits", "flowerz")),
        ("main_single_gpu.py", ("-cfg", "vit_digits", "./flowerz")),
        ("main_single_gpu.py", ("-cfg", "vit_digits", "-resume", "flowerz")),
        ("scripts/show_batch.py", ("flowerz",)),
        ("scripts/evaluate.py", ("flowerz",)),
        ("scripts/report.py", ("flowerz",)),
        ("scripts/predict.py", ("flowerz", "-part", "val")),
        ("scripts/checkpoint.py", ("list", "flowerz")),
    ],
)
def test_a_mistyped_path_is_answered_by_the_one_that_is_there(
    vitamp: Vitamp, tmp_path: Path, script: str, words: tuple[str, ...]
) -> None:
    (tmp_path / "flowers").mkdir()
    done = vitamp(*words, script=script, cwd=tmp_path, code=2)
    assert f"(did you mean {tmp_path / 'flowers'}?)" in done.err


def test_no_path_is_suggested_where_none_is_similar(vitamp: Vitamp, tmp_path: Path) -> None:
    (tmp_path / "flowers").mkdir()
    done = vitamp("./quartz", script="scripts/report.py", cwd=tmp_path, code=2)
    assert "quartz: no run there" in done.err
    assert "did you mean" not in done.err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["-batchsize=8"], ["unknown flag -batchsize", "Did you mean -batch_size"]),
        (["-batch_size", 5000, "NGPUS=2"], ["-ngpus has no effect", "DATA.BATCH_SIZE is 5000", "1437 images"]),
        (["-image_size", 30], ["DATA.IMAGE_SIZE", "30 is not divisible by MODEL.PATCH_SIZE 4", "28 or 32"]),
        (["TRAIN.SIZE_SCHEDULE=[[0,4]]"], ["[[0.0, 4]] ends with size 4; it must end with DATA.IMAGE_SIZE 8"]),
        (["MODEL.NUM_HEADS=3"], ["MODEL.NUM_HEADS", "MODEL.EMBED_DIM 16 is not divisible by MODEL.NUM_HEADS 3"]),
        (["-num_classes", 7], ["10 classes", "MODEL.NUM_CLASSES is 7"]),
        (["-dataset", "synthetic", "-num_classes", 5, "SAVE_BEST_BY=acc5"], ["acc5: always 100 % with 5 classes"]),
        (["-dataset", "digit"], ["DATA.DATASET", "'digit'", "Did you mean digits", "digits, imagefolder, imagen"]),
        (["TRAIN.OPTIMIZER.NAME=AdamX"], ["TRAIN.OPTIMIZER.NAME", "AdamX", "Did you mean"]),
        (["TRAIN.OPTIMIZER.NAME=AdamX", "-print_config"], ["TRAIN.OPTIMIZER.NAME", "AdamX", "Did you mean"]),
        (["MODEL.TYPE=timm", "MODEL.NAME=vit_tny_patch16_224"], ["vit_tny_patch16_224", "Did you mean"]),
        (["-resume", "nowhere"], ["nowhere", "no such file or folder"]),
        (["-resume", "~nobody_here/x"], ["-resume ~nobody_here/x: no such file or folder"]),
        (["-use", "~nobody_here/x.py"], ["-use ~nobody_here/x.py: cannot be read (No such file"]),
        (["-pretrained", "nowhere.safetensors"], ["nowhere.safetensors", "no such file"]),
        (["-device", "cuda"], ["-device cuda", "no GPU", "-device cpu"]),
        (["-amp", "O3", "AMP.DTYPE=fp16"], ["AMP.LEVEL O3 in fp16", "TRAIN.OPTIMIZER.EPS 1e-08", "O2"]),
        (["TRAIN.DISTILLATION_TYPE=hard"], ["DISTILLATION_TYPE hard", "needs a teacher", "NAME=FILE"]),
        (["-teacher_model", "resnet18"], ["is null. Set it to hard or soft, or TRAIN.TEACHER_MODEL to null"]),
        (["TRAIN.OPTIMIZER.NAME=muon", "DIST.STRATEGY=fsdp"], ["muon orthogonalises whole matrices", "STRATEGY fsdp"]),
        # Said before the error of MODEL.DEPTH, so before anything is built.
        (["TRAIN.CLASS_WEIGHTS=a.txt", "MODEL.DEPTH=99999999"], ["CLASS_WEIGHTS: expected balanced or null, got 'a"]),
        (
            ["TRAIN.CLASS_WEIGHTS=balanced", "TRAIN.MIXUP_ALPHA=0.8", "TRAIN.MIXUP_MODE=elem", "MODEL.DEPTH=99999999"],
            ["TRAIN.MIXUP_MODE elem: with TRAIN.CLASS_WEIGHTS", "use pair or batch"],
        ),
        (
            ["TRAIN.LOSS=bce", "TRAIN.BCE_TARGET_THRESH=0", "TRAIN.SMOOTHING=0.1", "MODEL.DEPTH=99999999"],
            ["TRAIN.BCE_TARGET_THRESH 0: with TRAIN.SMOOTHING 0.1"],
        ),
        (["-amp", "fp16", "AMP.INIT_LOSS_SCALING=1e308"], ["SCALING: expected number > 0 and <= 3e+38, got 1e308"]),
        (["THREADS=99999999999999"], ["THREADS: expected whole number >= 1 and <= 4096"]),
        (["MODEL.DEPTH=99999999"], ["99,999,999 blocks; at most 10,000 are supported"]),
        (["MODEL.EMBED_DIM=99999998"], ["119,999,999,999,999,962 weights, which take 447,034,836 GiB"]),
        (["DATA.IMAGE_SIZE=99999996"], ["The model has 9,999,999,200,003,802 weights"]),
        (["DATA.BATCH_SIZE=99999999999999999999999"], ["not one full batch"]),
    ],
    ids=lambda value: str(value[0]) if isinstance(value, list) else "",
)
def test_bad_setting_is_refused(refuses: Vitamp, words: list[str], said: list[str]) -> None:
    env = {"CUDA_VISIBLE_DEVICES": ""} if "cuda" in words else {}
    refuses(*words, said=tuple(said), env=env)


def test_file_as_output_is_refused(refuses: Vitamp, tiny: Path) -> None:
    refuses("-output", tiny / "run", said=(str(tiny), "is a file", "-output"))
    refuses(f"SAVE={tiny}/runs", said=(str(tiny), "is a file", "SAVE"))
    refuses("-output", tiny, said=(str(tiny), "is a file"))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_output_without_permission_is_refused(refuses: Vitamp, tmp_path: Path) -> None:
    (tmp_path / "locked").mkdir(mode=0o555)
    refuses("-output", tmp_path / "locked" / "run", said=("cannot write to",))


def test_ngpus_0_is_refused(refuses: Vitamp) -> None:
    refuses("-ngpus", 0, script="main_multi_gpu.py", said=("-ngpus 0", "at least one"))


def test_main_single_gpu_in_two_ranks_is_refused(refuses: Vitamp) -> None:
    """Also where its launcher gives no address for the ranks to meet."""
    env = {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0"}
    refuses(env=env, said=("main_single_gpu.py was started 2 times", "main_multi_gpu.py"))


@pytest.fixture
def run_folder(vitamp: Vitamp, tiny: Path, tmp_path: Path) -> Path:
    """A run with one checkpoint."""
    vitamp("-cfg", tiny, "-output", tmp_path / "run", "TRAIN.MAX_UPDATES=3", "TRAIN.OPTIMIZER.NAME=AdaMuon", code=0)
    return tmp_path / "run"


def test_what_does_not_go_with_a_run_is_refused_and_leaves_it_as_it_is(refuses: Vitamp, run_folder: Path) -> None:
    before = {path: path.read_bytes() for path in run_folder.rglob("*") if path.is_file()}
    refuses("-output", run_folder, said=("already contains a run", "-resume auto"))
    wider = "cls_token: (1, 1, 16) in the file, (1, 1, 24) in the model"
    deeper = "blocks.1.norm1.weight: missing in the file"
    for word, said in (
        ("MODEL.EMBED_DIM=24", ("model.safetensors", "weights of another architecture", wider)),
        ("MODEL.DEPTH=2", ("weights of another architecture", deeper)),
        ("DATA.IMAGE_SIZE=16", ("weights of another architecture", "pos_embed")),
        ("MODEL.NUM_HEADS=1", ("MODEL.NUM_HEADS: the run was trained with 2, but it is 1 now",)),
        ("-eval MODEL.POOL=mean", ("MODEL.POOL: the run was trained with null, but it is mean now",)),
        ("TRAIN.OPTIMIZER.NAME=Muon", ("TRAIN.OPTIMIZER.NAME: the run was trained with AdaMuon", "Muon now")),
        ("TRAIN.OPTIMIZER.MUON.EVERY_MATRIX=true", ("EVERY_MATRIX: the run was trained with false",)),
    ):
        refuses("-resume", run_folder, "TRAIN.OPTIMIZER.NAME=AdaMuon", *word.split(), said=said)
    assert {path: path.read_bytes() for path in run_folder.rglob("*") if path.is_file()} == before


def test_unreadable_checkpoint_is_refused(refuses: Vitamp, run_folder: Path) -> None:
    checkpoint = run_folder / "checkpoints" / "step-000000003"
    weights = checkpoint / "model.safetensors"
    weights.write_bytes(bytes(weights.stat().st_size))
    refuses("-resume", checkpoint, said=("damaged", "contents of model.safetensors"))
    (checkpoint / "meta.json").write_bytes(b"\x00\x01 not json")
    refuses("-resume", checkpoint, said=("meta.json", "cannot be read"))
    shutil.rmtree(checkpoint)
    refuses("-resume", run_folder, said=("no usable checkpoint", "step-*"))


def test_data_set_that_is_not_there_comes_with_the_layout_that_is(refuses: Vitamp, tmp_path: Path) -> None:
    """A recipe names a data set, and DATA_PATH holds something else: class folders, or a table."""
    icons = tmp_path / "icons"
    for name in ("a/1.png", "a/2.png", "b/1.png", "b/2.png"):
        save_image(icons / name, seed=1)
    offer = f"{icons} has class folders without train/ and val/: -dataset imagefolder"
    for named in ("cifar10", "imagenet2012", "shards", "csv"):
        refuses("-dataset", named, "-data_path", icons, said=(offer,))
    refuses("-dataset", "cifar10", "-data_path", icons, "-num_classes", "auto", said=("no cifar10 in", offer))
    (icons / "train.csv").write_text("path,label\na/1.png,a\nb/1.png,b\n", encoding="utf-8")
    (icons / "val.csv").write_text("path,label\na/2.png,a\nb/2.png,b\n", encoding="utf-8")
    refuses("-dataset", "cifar10", "-data_path", icons, said=(offer, "train.csv and val.csv: -dataset csv reads them"))


def test_weights_of_a_run_that_do_not_fit_come_with_the_words_that_build_its_model(
    refuses: Vitamp, digits_run: Path, tmp_path: Path
) -> None:
    """Sizes are those in the file, not those after timm resized a position embedding."""
    depth = "do not fit tiny: depth 1 in the weights, 5 in the recipe"
    said = (f"{depth}. For the model of the run, add MODEL.DEPTH=1 to the command:", "missing in the file")
    message = refuses("-pretrained", digits_run, "MODEL.DEPTH=5", "-image_size", 16, said=said).text
    assert "pos_embed" not in message, "it was resized, and fits"
    narrow = refuses("-pretrained", digits_run, "MODEL.EMBED_DIM=24", "-image_size", 16, said=("differ",)).text
    there = load_file(sorted(digits_run.glob("checkpoints/step-*/model.safetensors"))[-1])["pos_embed"].shape
    assert f"pos_embed: {'x'.join(map(str, there))} in the file" in narrow
    shutil.copy(sorted(digits_run.glob("checkpoints/step-*/model.safetensors"))[-1], tmp_path / "alone.safetensors")
    alone = refuses("-pretrained", tmp_path / "alone.safetensors", "MODEL.DEPTH=5", said=(f"{depth}: ",))
    assert "add MODEL" not in alone.err
