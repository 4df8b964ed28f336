"""bench/simulate_loading.py beside real runs.

`python -m tests.bench.test_simulate_loading docs/results/scale.json` compares more of them.
"""

import itertools
import json
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.datasets.shards.serving import FaultyStore, serving
from tests.datasets.shards.tar_files import write_set
from tests.program import Vitamp, run_program

pytest.importorskip("aiohttp", reason="reading over http needs aiohttp")

MODEL = "MODEL.EMBED_DIM=16 MODEL.DEPTH=1 MODEL.NUM_HEADS=1 MODEL.PATCH_SIZE=8 -image_size 8 -num_classes 3"
SAME = "-dataset shards -batch_size 6 -num_workers 1 SEED=3"
RUN = "-device cpu -threads 1 -epochs 2 VALIDATE_FREQ=9 DATA.CHECK=off TRAIN.WARMUP_EPOCHS=0"


def beside(folder: Path, ranks: int, gigabytes: float, files: int = 24, run: Vitamp | None = None) -> dict[str, Any]:
    """Requests and bytes of a run of two epochs, and of its simulation."""
    root, run = folder / f"set{files}", run or partial(run_program, slow_start=True, streams=folder, timeout=500)
    if not root.exists():
        write_set(root, [20] * files, val=1)
    cached = f"DATA.CACHE_GB={gigabytes}"
    run("-json", folder / "found.json", "-overwrite", "-data_path", root, *SAME.split(), "-ranks", ranks, cached,
        script="bench/simulate_loading.py", code=0)  # fmt: skip
    epochs = json.loads((folder / "found.json").read_text())["machine"]
    simulated = [epochs["first epoch"][what] + epochs["second epoch"].get(what, 0) for what in ("requests", "bytes")]
    FaultyStore.sent.clear()
    with tempfile.TemporaryDirectory() as own, serving(partial(FaultyStore, directory=str(folder))) as address:
        place = ("-data_path", f"{address}/{root.name}", "-output", f"{own}/run", f"DATA.CACHE={own}/cache", cached)
        run(*SAME.split(), *MODEL.split(), *RUN.split(), *place, "-ngpus", ranks, script="main_multi_gpu.py", code=0)
    sizes = [size for path, size in FaultyStore.sent if path.startswith(f"/{root.name}/train/") and size > 1]
    return {
        "files": files,
        "ranks": ranks,
        "cache_gb": gigabytes,
        "real": {"requests": len(sizes), "bytes": sum(sizes)},
        "simulated": {"requests": simulated[0], "bytes": simulated[1]},
    }


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_requests_are_those_of_a_run(tmp_path: Path, vitamp: Vitamp, ranks: int) -> None:
    found = beside(tmp_path, ranks, 0, run=vitamp)
    assert found["simulated"] == found["real"]
    assert found["real"]["requests"] < 960, "near images are one request"


def test_imagined_set_on_many_machines(tmp_path: Path, vitamp: Vitamp) -> None:
    """With a cache that is too small for the set, files are downloaded again; images of others are requested alone."""
    words = "-images 4000 -shard_images 40 -image_kb 1 -batch_size 8 -num_workers 2 -overwrite -json"
    simulate = partial(vitamp, script="bench/simulate_loading.py", cwd=tmp_path)
    small = simulate(*words.split(), "a.json", "DATA.CACHE_GB=0.004", code=0)
    assert "4,000 images in 100 tar files" in small.out
    one = json.loads((tmp_path / "a.json").read_text())
    assert one["machine"]["second epoch"]["files"] > 50
    assert one["machine"]["each image"]["requests"] == one["updates"] * 8 == 4000
    assert one["files_per_update"] < 6 < one["files_per_update_shuffled"] < 8
    assert one["list_bytes"] > 4000 * 50
    for room in ("0.0020", "0.0026"):  # of 20 tar files, and of 25
        simulate(*words.split(), "c.json", "-ranks", 4, f"DATA.CACHE_GB={room}", code=0)
        first = json.loads((tmp_path / "c.json").read_text())["machine"]["first epoch"]
        assert first.get("files", 0) < 120, "processes remove each other's files"
    many = simulate(*words.split(), "b.json", "-ranks", 2, "-machines", 50, "DATA.CACHE_GB=0.004", code=0)
    assert "a machine reads 2 % of them in an epoch" in many.text
    ways = json.loads((tmp_path / "b.json").read_text())["machine"]
    assert ways["second epoch"]["images"] == 80
    assert ways["first epoch"] == ways["near images together"]
    refused = simulate("-images", 9, "-dataset", "shards", "-data_path", tmp_path, code=2)
    assert "-images: the set in -data_path has its own; leave it out." in refused.err


def test_each_machine_downloads_its_own_tar_files_once(tmp_path: Path, vitamp: Vitamp) -> None:
    words = ("-images", 4000, "-shard_images", 40, "-image_kb", 1, "-ranks", 2, "-machines", 4, "-batch_size", 8)
    more = ("DATA.SAMPLER=by_machine", "DATA.CACHE_GB=0.004", "-json", "a.json")
    vitamp(*words, *more, script="bench/simulate_loading.py", cwd=tmp_path, code=0)
    machine = json.loads((tmp_path / "a.json").read_text())["machine"]
    assert 25 <= machine["first epoch"]["files"] <= 27
    assert "files" not in machine["second epoch"]


def test_images_that_are_left_out_are_not_requested(tmp_path: Path, vitamp: Vitamp) -> None:
    root, listed = write_set(tmp_path / "set", [20] * 4, val=1), tmp_path / "exclude.txt"
    listed.write_text("".join(f"train/0000.tar/{number:04d}.png\n" for number in range(8)))
    (table := tmp_path / "relabel.csv").write_text("path,given,proposed,decision\ntrain/0000.tar/0019.png,1,2,drop\n")
    lists = (f"DATA.EXCLUDE={listed}", f"DATA.RELABEL={table}")
    words = ("-data_path", root, "-batch_size", 8, *lists, "DATA.CACHE_GB=0", "-json", "a.json")
    vitamp(*words, script="bench/simulate_loading.py", cwd=tmp_path, code=0)
    assert json.loads((tmp_path / "a.json").read_text())["images"] == 71


MANY = "-images 14000000 -shard_images 10000 -ranks 8 -machines 512 -num_workers 1"


def compare(results: Path) -> None:
    """Write runs beside their simulations, and 4,096 ranks; what is in the file stays."""
    found: dict[str, Any] = json.loads(results.read_text()) if results.exists() else {"runs": []}
    done = [(one["ranks"], one["cache_gb"]) for one in found["runs"]]
    with tempfile.TemporaryDirectory() as place:
        for ranks, size in itertools.product((1, 2, 3, 4), (0, 50, 0.0021)):  # the last: 25 of 36 files
            if (ranks, size) not in done:
                found["runs"].append(beside(Path(place), ranks, size, 36 if 0 < size < 1 else 24))
                results.write_text(json.dumps(found, indent=1) + "\n")
        run = partial(run_program, script="bench/simulate_loading.py", slow_start=True, streams=Path(place))
        for name, command in (("many", MANY), ("many_by_machine", f"{MANY} DATA.SAMPLER=by_machine")):
            run(*command.split(), "-json", f"{place}/{name}.json", timeout=3600, code=0)
            found[name] = {"command": command, **json.loads(Path(place, f"{name}.json").read_text())}
    results.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    compare(Path(sys.argv[1]))
