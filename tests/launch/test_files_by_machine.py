"""DATA.SAMPLER by_machine on two machines, which are two torchruns with a cache each."""

import contextlib
import json
import shutil
import sys
from functools import partial
from pathlib import Path

import pytest

from tests.datasets.opened import of_shards, part
from tests.datasets.shards.serving import FaultyStore, serving
from tests.datasets.shards.tar_files import write_set
from tests.launch.clusters import MULTI, Command
from tests.program import Result, last_weights, metrics, run_program
from tests.waiting import free_port
from vitamp.checkpoints import sha256_of

pytest.importorskip("aiohttp", reason="reading over http needs aiohttp")

MODEL = "MODEL.EMBED_DIM=16 MODEL.DEPTH=1 MODEL.NUM_HEADS=1 MODEL.PATCH_SIZE=8 -image_size 8 -num_classes 3"
WORDS = (
    *f"-dataset shards {MODEL} -device cpu -threads 1 -batch_size 4 -num_workers 0 SEED=3 REPORT_FREQ=1".split(),
    *("DATA.SAMPLER=by_machine", "DATA.CHECK=off", "-epochs", 2, "VALIDATE_FREQ=9", "TRAIN.WARMUP_EPOCHS=0"),
)


def on_machines(folder: Path, ranks: int, *words: object, machines: int = 2, code: int = 0) -> Result:
    """Train on so many machines with so many ranks each; the cache of one is below its home."""
    port, started = free_port(), list[Command]()
    with contextlib.ExitStack() as ended:
        for number in range(machines):
            nodes = ("--nnodes", machines, "--node_rank", number, "--nproc_per_node", ranks)
            place = ("--master_addr", "localhost", "--master_port", port)
            command = (sys.executable, "-m", "torch.distributed.run", *nodes, *place, MULTI, *WORDS, *words)
            started.append(Command(*command, env={"HOME": str(folder / f"home{number}")}))
            ended.callback(started[-1].kill)
        done = [one.end(240) for one in started]
    assert all((one.code == 0) == (code == 0) for one in done), done[0].text + done[-1].text
    return done[0]


@pytest.mark.slow  # its order is tested more quickly in tests/datasets/loading
def test_each_machine_downloads_files_of_its_own_and_a_resume_is_exact(tmp_path: Path) -> None:
    """264 images in 24 files: 16 updates of 16 images, and one of 8."""
    root = write_set(tmp_path / "set", [11] * 24, val=1)
    sizes = {f"/set/train/{path.name}": path.stat().st_size for path in (root / "train").iterdir()}
    names = {sha256_of(path): path.name for path in (root / "train").iterdir()}
    part(of_shards(root))  # writes the index beside
    FaultyStore.sent.clear()
    with serving(partial(FaultyStore, directory=str(tmp_path))) as address:
        words = ("-data_path", f"{address}/set", "TRAIN.ACCUM_ITER=2")
        whole, parted = tmp_path / "whole", tmp_path / "parted"
        on_machines(tmp_path, 1, *words, "-output", whole)
        order = "17 updates per epoch, the last of 8 images; each of 2 machines reads tar files of its own"
        assert order in (whole / "log.txt").read_text()
        caches = [tmp_path / home / ".cache" / "vitamp" / "tars" for home in ("home0", "home1")]
        kept = [{names.get(sha256_of(path), "val") for path in cache.glob("*.tar")} - {"val"} for cache in caches]
        assert len(kept[0] | kept[1]) >= 22, "those of the end may not be needed any more"
        assert len(kept[0] & kept[1]) <= 1, "one file is cut"
        downloads = [path for path, size in FaultyStore.sent if size == sizes.get(path)]
        simulated = ("DATA.SAMPLER=by_machine", "-machines", 2, "-batch_size", 4, "TRAIN.ACCUM_ITER=2", "SEED=3")
        simulate = partial(run_program, script="bench/simulate_loading.py", streams=tmp_path, slow_start=True)
        simulate(*simulated, "-data_path", root, "-json", tmp_path / "found.json", code=0)
        found = json.loads((tmp_path / "found.json").read_text())
        of_one = found["machine"]["first epoch"]["files"] + found["machine"]["second epoch"].get("files", 0)
        assert found["updates"] == 17
        assert len(downloads) <= 25
        assert abs(len(downloads) - 2 * of_one) <= 2, (len(downloads), found)

        on_machines(tmp_path, 1, *words, "-output", parted, "TRAIN.MAX_UPDATES=25")
        refused = run_program("-resume", parted, script="main_multi_gpu.py", streams=tmp_path)
        assert refused.code == 2
        assert "264 as before, in another order" in refused.err
        assert "(by_machine: the number of machines)" in refused.err
        shutil.copytree(parted, others := tmp_path / "others")
        on_machines(tmp_path, 1, "-resume", parted, "TRAIN.MAX_UPDATES=null")
        on_machines(tmp_path, 2, "-resume", others, "TRAIN.MAX_UPDATES=null")
    assert last_weights(parted) == last_weights(whole)
    assert metrics(parted, "train") == metrics(whole, "train")
    # Four ranks add gradients in another order than two.
    losses = [[line["loss"] for line in metrics(run, "train")] for run in (others, whole)]
    assert losses[0] == pytest.approx(losses[1], abs=1e-6)
