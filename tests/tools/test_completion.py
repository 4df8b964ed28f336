"""scripts/completion.py: completions in real shells."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from datasets import names
from tests.program import ROOT
from tools.common.command_line import PAGES
from tools.completion import command as completion
from tools.completion import words as completion_words
from tools.completion.table import ENTRIES, table
from utils.cli import FLAGS
from utils.precisions import AMP_WORDS

Offers = Callable[[str], list[str]]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Cache with model names: importing timm would take seconds."""
    home = tmp_path_factory.mktemp("cache")
    (home / "vitamp").mkdir()
    (home / "vitamp" / "models.txt").write_text("resnet10t\nvit_base_patch16_224\nvit_tiny_patch16_224\n")
    return home


@pytest.fixture(scope="module")
def everything() -> dict[str, object]:
    return json.loads(json.dumps(table()))


@pytest.fixture
def offers(everything: dict[str, object], cache: Path, monkeypatch: pytest.MonkeyPatch) -> Offers:
    """Completions of a command line that ends at the cursor."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    monkeypatch.chdir(ROOT)

    def offered(line: str) -> list[str]:
        found = completion_words.complete(line.split(" "), everything)
        return ["no program of ours"] if found is None else [word for word, _ in found]

    return offered


def test_flags_and_their_values_are_completed(offers: Offers) -> None:
    every = [f"-{flag.name}" for group in FLAGS.values() for flag in group]
    for program in ENTRIES:
        assert offers(f"python {program} -") == every
    assert offers("./main_single_gpu.py --data") == ["--dataset", "--data_path"]
    assert offers("python main_single_gpu.py -amp ")[: len(AMP_WORDS.split())] == AMP_WORDS.split()
    assert "-cfg" in offers("python main_single_gpu.py -amp "), "-amp takes no value as well"
    assert offers("python main_single_gpu.py -amp=b") == ["-amp=bf16"]
    assert offers("python main_single_gpu.py -device c") == ["cpu", "cuda"]
    assert offers("python main_single_gpu.py -dataset ") == [*names(), "hf:"]
    assert offers("python main_single_gpu.py -batch_size ") == ["auto"]
    assert offers("python main_single_gpu.py -accum_iter ") == [], "a number has no completions"


def test_settings_and_their_values_are_completed(offers: Offers) -> None:
    assert offers("torchrun --nproc_per_node 2 main_multi_gpu.py AMP.LEV") == ["AMP.LEVEL="]
    assert offers("python main_single_gpu.py AMP.LEVEL=") == [
        f"AMP.LEVEL={o}" for o in ("O0", "O1", "O2", "NAIVE", "O3")
    ]
    assert offers("python main_single_gpu.py TRAIN.MODEL_EMA=") == ["TRAIN.MODEL_EMA=true", "TRAIN.MODEL_EMA=false"]
    assert offers("python main_single_gpu.py MODEL.NAME=vit_t") == ["MODEL.NAME=vit_tiny_patch16_224"]
    assert offers("python main_single_gpu.py NO.SUCH=") == []
    assert "LOCAL_RANK=" not in offers("python main_single_gpu.py L"), "it has no effect"


def test_recipes_are_completed_from_any_folder(offers: Offers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "configs/vit_digits.yaml" in offers("python main_single_gpu.py -cfg ")
    assert offers("python main_single_gpu.py -cfg configs/vit_digits.y") == ["configs/vit_digits.yaml"]
    (tmp_path / "own.yaml").touch()
    (tmp_path / "own.txt").touch()
    monkeypatch.chdir(tmp_path)
    found = offers(f"python {ROOT}/main_single_gpu.py -cfg ")
    assert "own.yaml" in found
    assert "own.txt" not in found
    assert f"{ROOT}/configs/vit_digits.yaml" in found


def test_flags_of_tools_are_completed(offers: Offers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert offers("python scripts/checkpoint.py a") == ["average"]
    assert offers("python scripts/export.py runs -dtype ") == ["fp32", "fp16", "bf16"]
    assert "-updates" in offers("python scripts/choose_precision.py -")
    assert "-dataset" in offers("python scripts/choose_precision.py -"), "it takes the flags of a run too"
    assert "-print_config" not in offers("python scripts/choose_precision.py -"), "but no flag that replaces training"
    assert offers("python scripts/benchmark_amp.py a") == ["amp"]
    assert sorted(offers("python scripts/benchmark_amp.py scaling -mod")) == ["-model", "-models", "-modes"]
    assert offers("python scripts/completion.py ") == ["bash", "zsh", "fish"]
    assert offers("python scripts/report.py runs -no") == ["-no_predictions"]
    assert not [tool for tool in PAGES if offers(f"python scripts/{tool} -")[0][0] != "-"], "every tool has its flags"
    (tmp_path / "runs").mkdir()
    monkeypatch.chdir(tmp_path)
    assert "runs/" in offers("python scripts/export.py ")


def test_other_programs_are_not_completed(offers: Offers) -> None:
    assert offers("python train.py -") == ["no program of ours"]
    assert offers("python main_sing") == ["no program of ours"]


def test_completion_imports_no_torch_and_follows_its_sources(cache: Path) -> None:
    """Site-packages are not searched at a TAB. A newer source makes the table again."""
    command = [sys.executable, "-I", "-S", "-X", "importtime", str(ROOT / "tools" / "completion" / "words.py")]
    env = {**os.environ, "XDG_CACHE_HOME": str(cache)}

    def ask() -> subprocess.CompletedProcess[str]:
        words = ["python", "main_single_gpu.py", "-amp", "b"]
        return subprocess.run([*command, *words], env=env, capture_output=True, text=True, check=True, timeout=60)

    assert ask().stdout == "bf16\t\n"
    kept = next((cache / "vitamp").glob("completion-*.json"))
    made = kept.stat().st_mtime_ns
    done = ask()
    assert not [module for module in ("torch", "pydantic", "utils") if f" {module}\n" in done.stderr]
    assert kept.stat().st_mtime_ns == made, "unchanged sources keep the table"
    os.utime(kept, (0, 0))
    assert ask().stdout == "bf16\t\n"
    assert kept.stat().st_mtime_ns >= made, "a newer source replaces it"


@pytest.fixture
def shells(cache: Path, tmp_path: Path) -> dict[str, str]:
    for shell in completion.SHELLS:
        (tmp_path / f"vitamp.{shell}").write_text(completion.script_for(shell))
    return {**os.environ, "XDG_CACHE_HOME": str(cache), "HOME": str(tmp_path), "TERM": "dumb"}


def in_shell(command: list[str], env: dict[str, str]) -> list[str]:
    if shutil.which(command[0]) is None:
        pytest.skip(f"{command[0]} is not installed")
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


BASH = """
others() { COMPREPLY=("what python's own completion offers"); }
complete -F others python
source "$HOME/vitamp.bash"
offered() {
    COMP_LINE=$1 COMP_POINT=${#1} COMPREPLY=()
    local registered; registered=$(complete -p "${1%% *}")
    [[ $registered =~ -F\\ ([^ ]+) ]] && "${BASH_REMATCH[1]}" "${1%% *}"
    echo "${COMPREPLY[*]}"
}
mkdir -p "$HOME/a b"
offered "python main_single_gpu.py -dat"
offered "python main_single_gpu.py DATA.DATASET=im"
offered "main_multi_gpu.py AMP.LEVEL=O"
offered "torchrun --standalone main_multi_gpu.py MODEL.NAME=vit"
offered "python main_single_gpu.py -output $HOME/a"
offered "python other.py -dat"
"""


def test_bash_completes(shells: dict[str, str], tmp_path: Path) -> None:
    assert in_shell(["bash", "--norc", "--noprofile", "-c", BASH], shells) == [
        "-dataset -data_path",
        "imagefolder imagenet2012",  # = begins a new word in bash
        "O0 O1 O2 O3",
        "vit_base_patch16_224 vit_tiny_patch16_224",
        f"{tmp_path}/a\\ b/",
        "what python's own completion offers",
    ]


FISH = """
source "$HOME/vitamp.fish"
set lines "python main_single_gpu.py -dat" "./main_multi_gpu.py AMP.LEVEL=O"
set lines $lines "python other.py -dat" "python other.py REA"
for line in $lines
    echo (string join -- " " (complete -C $line | string replace \\t ": "))
end
"""


def test_fish_completes(shells: dict[str, str]) -> None:
    assert in_shell(["fish", "--no-config", "-c", FISH], shells) == [
        "-dataset: data set: imagenet2012, imagefolder, csv, shards, hf:NAME, ... (docs/data.md) "
        "-data_path: folder of the data set",
        "AMP.LEVEL=O0 AMP.LEVEL=O1 AMP.LEVEL=O2 AMP.LEVEL=O3",
        "",
        "README.md",
    ]


ZSH = """
zmodload zsh/zpty
wait_for() {
    local got all=
    while zpty -r -t z got || sleep 0.05; do
        all+=$got
        [[ $all == *$1* ]] && break
    done
    print -r -- "$all"
}
zpty z zsh -f -i
zpty -w z 'autoload -Uz compinit; compinit -u; source "$HOME/vitamp.zsh"; PS1="rea""dy> "'
wait_for 'ready> ' >/dev/null # a prompt: zsh reads key by key from here
zpty -w -n z "python main_single_gpu.py AMP.LEVEL=N"$'\\t'
wait_for AMP.LEVEL=NAIVE
zpty -w -n z $'\\C-u'"python main_single_gpu.py -data"$'\\t' # on an empty line
wait_for "folder of the data set"
"""


@pytest.mark.skipif(shutil.which("zsh") is None, reason="zsh is not installed")
def test_zsh_completes(shells: dict[str, str]) -> None:
    said = "\n".join(in_shell(["timeout", "-k", "5", "60", "zsh", "-f", "-c", ZSH], shells))
    assert "AMP.LEVEL=NAIVE" in said
    assert "-data_path  folder of the data set" in said


def test_unknown_shell_is_refused(capfd: pytest.CaptureFixture[str]) -> None:
    assert completion.main(["zhs"]) == 2
    assert "SHELL zhs: takes bash, zsh or fish. Did you mean zsh?" in capfd.readouterr().err
    assert completion.main(["bash"]) == 0
    assert "complete -o default" in capfd.readouterr().out
