"""benchmark_amp.py all: tables of several models in one folder, gone on with where the time was up."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from scripts.dev import results
from tests.program import TINY_DIGITS, Result, run_program
from tools.benchmark_amp import all as benchmark_amp_all
from tools.benchmark_amp import all_jobs
from tools.benchmark_amp import ceiling as benchmark_amp_ceiling
from tools.benchmark_amp.all_jobs import asked_for
from tools.benchmark_amp.command import main
from tools.benchmark_amp.settings import changed
from utils.config import load_config
from utils.errors import EXIT_DONE, EXIT_FAILED, EXIT_INTERRUPTED, EXIT_USAGE

NET = ["-width", "8", "-batches", "2", "-simplenet_epochs", "1"]
SMALL = ["-iters", "1", "-windows", "2", "-rounds", "2", *NET]
FILES = ["simplenet", "windows_tiny_batch_16", "windows_tiny_batch_8"]
AllTables = Callable[..., tuple[int, str, str]]


def words(place: Path, folder: Path) -> list[str]:
    what = ["-tables", "windows,simplenet", "-models", "tiny:16,tiny:8"]
    return ["all", "-cfg", str(place / "tiny.yaml"), "-dir", str(folder), *what, *SMALL]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("all")
    (made / "tiny.yaml").write_text(TINY_DIGITS, encoding="utf-8")
    return made


@pytest.fixture(scope="module")
def measured(place: Path) -> Result:
    """Not to be changed: tests share its folder, `place / "tables"`."""
    script = "scripts/benchmark_amp.py"
    return run_program(*words(place, place / "tables"), script=script, timeout=180, streams=place)


@pytest.fixture
def again(place: Path, measured: Result, tmp_path: Path) -> tuple[Path, list[str]]:
    """A copy of the folder, and the call that made it."""
    assert measured.code == EXIT_DONE, measured.text
    shutil.copytree(place / "tables", tmp_path / "tables")
    return tmp_path / "tables", words(place, tmp_path / "tables")


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> AllTables:
    def called(argv: list[str]) -> tuple[int, str, str]:
        capsys.readouterr()
        code = main(argv)
        told = capsys.readouterr()
        return code, told.out, told.err

    return called


def read(folder: Path, name: str) -> dict[str, Any]:
    return json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))


def change(folder: Path, name: str, **values: Any) -> None:
    (folder / f"{name}.json").write_text(json.dumps(read(folder, name) | values), encoding="utf-8")


def rounds(found: dict[str, Any]) -> set[int]:
    return {len(turns) for turns in found["turns"].values()}


def test_every_table_of_every_model(place: Path, measured: Result, monkeypatch: pytest.MonkeyPatch) -> None:
    assert measured.code == EXIT_DONE, measured.text
    folder = place / "tables"
    pictures = [f"{name}.png" for name in FILES]
    assert sorted(path.name for path in folder.iterdir()) == sorted(
        ["overview.md", *pictures, *(f"{name}.json" for name in FILES)]
    )
    monkeypatch.setattr(results, "RESULTS", folder)
    overview = (folder / "overview.md").read_text(encoding="utf-8")
    for name in FILES:
        found = read(folder, name)
        assert rounds(found) == {2}
        assert f"  {found['command']}\n" in measured.out, "the table is told"
        assert results.table(name).replace("LINK/", "") in overview
        assert f"({name}.png)" in overview
    cfg = ["-cfg", str(place / "tiny.yaml")]
    for batch in ("16", "8"):
        found = read(folder, f"windows_tiny_batch_{batch}")
        assert found["settings"]["DATA.BATCH_SIZE"] == batch
        alone = ["windows", "-model", "tiny", "-batch_size", batch, *cfg, "-iters", "1", "-windows", "2"]
        assert found["command"].split() == ["python", "scripts/benchmark_amp.py", *alone]
    flags = ["-rounds", "2", "-width", "8", "-batches", "2", "-epochs", "1"]
    assert read(folder, "simplenet")["command"].split()[2:] == ["simplenet", *cfg, *flags]
    assert measured.out.splitlines()[-1].startswith("done 3 (windows_tiny_batch_16, windows_tiny_batch_8, simplenet)")


def test_what_is_whole_is_not_begun_again(
    again: tuple[Path, list[str]], call: AllTables, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, argv = again
    monkeypatch.setattr(benchmark_amp_all, "plan_and_measure", None)  # whoever called it would fail
    before = {path.name: path.read_bytes() for path in folder.glob("*.json")}
    (folder / "overview.md").unlink()
    (folder / "simplenet.png").unlink()
    code, out, _ = call(argv)
    assert code == EXIT_DONE
    assert {path.name: path.read_bytes() for path in folder.glob("*.json")} == before
    assert (folder / "overview.md").is_file()
    assert (folder / "simplenet.png").is_file(), "what a call that was killed left out is made up for"
    assert "Three linear layers of 8" in out


def test_the_same_call_goes_on(again: tuple[Path, list[str]], call: AllTables) -> None:
    """With a table that was cut off, whose turns stay; one that was never begun; and none that is whole."""
    folder, argv = again
    cut = {name: turns[:1] for name, turns in read(folder, "simplenet")["turns"].items()}
    change(folder, "simplenet", turns=cut, cut=True)
    code, out, _ = call(argv)
    assert code == EXIT_DONE
    found = read(folder, "simplenet")
    assert rounds(found) == {2}
    assert not found["cut"]
    assert {name: turns[:1] for name, turns in found["turns"].items()} == cut
    assert "simplenet: table 3 of 3" in out
    assert "table 1 of 3" not in out


def test_cut_off_by_the_budget(place: Path, tmp_path: Path, call: AllTables) -> None:
    endless = ["-tables", "simplenet,windows", "-rounds", "100000", *NET, "-budget_min", "0.02"]
    argv = ["all", "-cfg", str(place / "tiny.yaml"), "-dir", str(tmp_path), *endless]
    code, out, err = call(argv)
    assert code == EXIT_DONE
    first = read(tmp_path, "simplenet")
    done = max(rounds(first))
    assert 1 <= done < 100000
    last = err.splitlines()[-1]
    assert "begun 1 (simplenet), left 1 (windows_tiny)" in last
    assert last.endswith(" ".join(["python scripts/benchmark_amp.py", *argv]))
    assert "of 100000 rounds" in out
    assert "of 100000 rounds | simplenet.json" in (tmp_path / "overview.md").read_text(encoding="utf-8")
    assert call(argv)[0] == EXIT_DONE
    second = read(tmp_path, "simplenet")
    assert max(rounds(second)) > done
    assert all(second["turns"][name][: len(turns)] == turns for name, turns in first["turns"].items())


def test_what_cannot_end_in_time_is_not_begun(again: tuple[Path, list[str]], call: AllTables) -> None:
    """As long as the same table took for another model."""
    folder, argv = again
    change(folder, "windows_tiny_batch_16", took={"to_begin": 50, "a_turn": 50})
    (folder / "windows_tiny_batch_8.json").unlink()
    code, _, err = call([*argv, "-budget_min", "1.6"])
    assert code == EXIT_FAILED
    assert "before anything was measured" in err
    assert not (folder / "windows_tiny_batch_8.json").exists()


def test_no_time_at_all(place: Path, tmp_path: Path, call: AllTables) -> None:
    """The table has not failed: it is left for the next call."""
    argv = ["all", "-cfg", str(place / "tiny.yaml"), "-dir", str(tmp_path), "-tables", "simplenet"]
    code, _, err = call([*argv, "-budget_min", "0.00001"])
    assert code == EXIT_FAILED
    assert "before anything was measured" in err.splitlines()[-1]
    assert "| simplenet |  | left |" in (tmp_path / "overview.md").read_text(encoding="utf-8")


def test_one_that_fails_is_told_and_the_others_go_on(place: Path, tmp_path: Path, call: AllTables) -> None:
    what = ["-tables", "peers,simplenet", "-timm_train", "nowhere.py", "-rounds", "2", *NET]
    argv = ["all", "-cfg", str(place / "tiny.yaml"), "-dir", str(tmp_path), *what]
    code, out, _ = call(argv)
    assert code == EXIT_FAILED
    assert rounds(read(tmp_path, "simplenet")) == {2}
    assert "failed 1 (peers_tiny)" in out.splitlines()[-1]
    why = f"peers, tiny: -timm_train {Path('nowhere.py').resolve()}: no such file"
    assert f"  {why}" in out
    assert f"- {why}" in (tmp_path / "overview.md").read_text(encoding="utf-8")


def test_where_nothing_could_be_measured(
    again: tuple[Path, list[str]], call: AllTables, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, argv = again
    name = "windows_tiny_batch_8"
    change(folder, name, turns={name: [{"failed": "out of memory"}] for name in read(folder, name)["turns"]})
    monkeypatch.setattr(benchmark_amp_all, "plan_and_measure", None)
    code, out, _ = call(argv)
    assert code == EXIT_FAILED
    assert "out of memory" in out
    assert "failed 1 (windows_tiny_batch_8)" in out.splitlines()[-1]


def test_interrupted(again: tuple[Path, list[str]], call: AllTables, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    folder, argv = again
    (folder / "simplenet.json").unlink()
    (folder / "overview.md").unlink()
    monkeypatch.setattr(benchmark_amp_all, "plan_and_measure", interrupted)
    code, _, err = call(argv)
    assert code == EXIT_INTERRUPTED
    assert "left 1 (simplenet)" in err
    assert "| simplenet |  | left |" in (folder / "overview.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["-windows_iters", "2"], ["it was measured by", "-iters 1", "-iters 2", "another -dir"]),
        (["-amp", "fp16"], ["it was measured by", "-amp fp16"]),
    ],
)
def test_a_folder_of_another_call_is_left_as_it_is(
    again: tuple[Path, list[str]], call: AllTables, more: list[str], said: list[str]
) -> None:
    folder, argv = again
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    code, _, err = call([*argv, *more])
    assert code == EXIT_USAGE
    assert all(word in err for word in said), err
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_files_of_other_versions_or_of_others_are_left_alone(again: tuple[Path, list[str]], call: AllTables) -> None:
    folder, argv = again
    change(folder, "simplenet", versions={"torch": "1.0"})
    code, _, err = call(argv)
    assert (code, "other versions" in err) == (EXIT_USAGE, True)
    (folder / "simplenet.json").write_text('{"loss": 3}', encoding="utf-8")
    code, _, err = call(argv)
    assert (code, "was not written by benchmark_amp.py" in err) == (EXIT_USAGE, True)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["-tables", "windows,mode"], ["-tables windows,mode", "Did you mean modes?"]),
        (["-models", "tiny:0"], ["-models tiny:0", "vit_small_patch16_224:512"]),
        (["-model", "tiny"], ["unknown flag -model", "Did you mean -models?"]),
        (["-json", "f.json"], ["unknown flag -json"]),
        (["-tables", "windows", "-updates", "3"], ["-updates: only peers", "windows"]),
        (["-tables", "windows", "-peers_rounds", "3"], ["-peers_rounds: only peers"]),
        (["-tables", "scaling,simplenet", "-batches", "3"], ["-batches", "-simplenet_batches or -scaling_batches"]),
        (["-models", "tiny", "MODEL.NAME=small"], ["MODEL.NAME=small", "leave one out"]),
        (["-models", "tiny:8", "DATA.BATCH_SIZE=3"], ["DATA.BATCH_SIZE=3", "leave one out"]),
        (["TRAIN.BASELR=3"], ["TRAIN.BASELR", "Did you mean TRAIN.BASE_LR?"]),
        (["-budget_min", "0"], ["-budget_min 0", "above 0"]),
    ],
    ids=lambda value: " ".join(value[:4]),
)
def test_what_is_refused(place: Path, tmp_path: Path, call: AllTables, more: list[str], said: list[str]) -> None:
    folder = tmp_path / "tables"
    code, _, err = call(["all", "-cfg", str(place / "tiny.yaml"), "-dir", str(folder), *more])
    assert code == EXIT_USAGE
    assert all(word in err for word in said), err
    assert not folder.exists()


def test_each_table_takes_the_flags_that_it_knows(tmp_path: Path) -> None:
    argv = ["-tables", "scaling,modes,simplenet", "-models", "tiny:8,small", "-dir", str(tmp_path), "-batch_size", "4"]
    own = ["-rounds", "5", "-modes_rounds", "2", "-scaling_models", "a,b", "-simplenet_batches=3", "-no_files"]
    jobs = asked_for([*argv, *own, "-amp", "SEED=3"]).jobs
    tiny, small = ["-model", "tiny", "-batch_size", "8"], ["-model", "small", "-batch_size", "4"]
    assert {job.file.stem: job.words for job in jobs} == {
        "scaling_tiny_batch_8": [*tiny, "-rounds", "5", "-models", "a,b", "-amp", "SEED=3"],
        "scaling_small": [*small, "-rounds", "5", "-models", "a,b", "-amp", "SEED=3"],
        "modes_tiny_batch_8": [*tiny, "-rounds", "2", "-no_files", "-amp", "SEED=3"],
        "modes_small": [*small, "-rounds", "2", "-no_files", "-amp", "SEED=3"],
        "simplenet": ["-batch_size", "4", "-rounds", "5", "-batches", "3", "-amp", "SEED=3"],
    }
    assert all(job.line().run.words == {"SEED": "3"} for job in jobs)


def test_without_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = asked_for(["-device", "cpu"]).jobs
    assert {job.file.parent for job in jobs} == {Path("output/tables")}
    assert [job.file.stem for job in jobs] == [
        "windows_vit_tiny_patch16_224",
        "modes_vit_tiny_patch16_224",
        "simplenet",
    ]
    monkeypatch.setattr(all_jobs, "_on_cpu", lambda *_: False)
    found = [job.name for job in asked_for([]).jobs]
    assert len(found) == 12
    assert found[:4] == [
        "windows, vit_small_patch16_224",
        "windows, vit_base_patch16_224",
        "windows, vit_large_patch16_224",
        "modes, vit_small_patch16_224",
    ]


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["all", "-h"])
    assert left.value.code == 0
    told = capsys.readouterr().out
    assert all(word in told for word in ("-dir DIR", "-tables A,B", "-models A:N,B", "-budget_min M"))


def test_a_device_is_measured_once_for_all_tables(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kinds: list[torch.dtype] = []
    monkeypatch.setattr("engine.measure.mfu.measured_tflops", lambda _device, dtype: kinds.append(dtype) or 0.05)
    monkeypatch.setattr(benchmark_amp_ceiling, "_peaks", {})
    config = load_config(str(place / "tiny.yaml")).config
    on = changed(config, "AMP", ENABLED=True, DTYPE="bf16").AMP
    first = benchmark_amp_ceiling.ceiling(config, torch.device("cpu"), (config.AMP, on))
    assert benchmark_amp_ceiling.ceiling(config, torch.device("cpu"), (on, config.AMP))["peaks"] == first["peaks"]
    assert kinds == [torch.float32, torch.bfloat16]
