"""Tools share their work among the processes of a launcher, and write what one process writes."""

import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.launch.clusters import MPI_AS_ROOT, RANK_VARIABLES, Command, Slurm, launch, needs
from tests.program import ROOT, Result, all_bytes, run_program
from tests.waiting import free_port

TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2")
MPIRUN = ("mpirun", "-n", "2", "--bind-to", "none", "--oversubscribe", sys.executable)
SRUN = ("srun", "-n", "2", sys.executable)


@pytest.fixture(scope="module")
def photographs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Class folders of 40 + 10 images; one is broken, one is in both splits."""
    root, random = tmp_path_factory.mktemp("photographs"), np.random.default_rng(0)
    for number in range(50):
        path = root / ("train" if number < 40 else "val") / "ab"[number % 2] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(random.integers(0, 256, (48, 64, 3), dtype=np.uint8)).save(path)
    (root / "train" / "b" / "3.png").write_bytes(b"broken")
    (root / "val" / "a" / "0.png").write_bytes((root / "train" / "a" / "0.png").read_bytes())
    return root


@pytest.mark.parametrize(
    ("tool", "launcher"),
    [("pack_images", TORCHRUN), pytest.param("check_data", SRUN, marks=pytest.mark.slow), ("predict", MPIRUN)],
)
def test_ranks_write_the_bytes_of_one_process(
    tool: str, launcher: tuple[str, ...], photographs: Path, digits_run: Path, tmp_path: Path
) -> None:
    data = ("-dataset", "imagefolder")
    words: dict[str, tuple[object, ...]] = {
        "pack_images": (photographs, "out", "-shard_images", 7, *data, "DATA.MAX_BAD=1"),
        "check_data": (*data, "-data_path", photographs, "-num_classes", 2, "-json", "out.json", "-fix", "out.txt"),
        "predict": (digits_run, photographs, "-batch_size", 4, "-out", "out.csv", "-num_workers", 1),
    }
    command = (str(ROOT / "scripts" / f"{tool}.py"), *words[tool])
    code = {"pack_images": 0, "check_data": 1, "predict": 1}[tool]
    (one := tmp_path / "one").mkdir()
    (two := tmp_path / "two").mkdir()
    alone = run_program(*command[1:], script=f"scripts/{tool}.py", cwd=one, code=code, streams=tmp_path)
    env, slurm = {**MPI_AS_ROOT, "PYTHONPATH": str(ROOT)}, None
    if launcher is SRUN:
        needs("munged", "slurmctld", "slurmd", "srun", root=True, package="slurm-wlm")
        slurm = Slurm()
        slurm.start()
        env |= slurm.env
    elif launcher is MPIRUN:
        needs("mpirun", package="openmpi-bin")
    try:
        started = Command(*launcher, *command, env=env, cwd=two)
        shared = started.end(240)
    finally:
        if slurm is not None:
            slurm.stop()
    assert (shared.code != 0) == (code != 0), shared.err
    assert all_bytes(one) == all_bytes(two)
    assert shared.out == alone.out.replace(str(one), str(two)), "one report"


def by_hand(rank: int, port: int, *words: object) -> Command:
    values = (str(rank), "2", str(rank), "2", "127.0.0.1", str(port))
    env = {str(name): value for name, value in zip(RANK_VARIABLES, values, strict=True)}
    return Command(sys.executable, ROOT / "scripts" / "pack_images.py", *words, env=env)


def test_error_of_one_rank_ends_all_and_packing_resumes(photographs: Path, tmp_path: Path) -> None:
    words = (photographs, tmp_path / "out", "-shard_images", 7, "-dataset", "imagefolder")

    def both(*more: object) -> list[Result]:
        port = free_port()
        started = [by_hand(rank, port, *words, *more) for rank in (0, 1)]
        return [command.end(120) for command in started]

    zero, one = both("DATA.MAX_BAD=0")
    text = zero.err + one.err
    assert (zero.code, one.code) == (1, 1), text
    assert "1 images cannot be read, and DATA.MAX_BAD allows 0" in zero.err, text
    assert "1 images cannot be read, and DATA.MAX_BAD allows 0" in one.err, text
    assert "Traceback" not in text, text
    zero, one = both("DATA.MAX_BAD=1")
    assert (zero.code, one.code) == (0, 0), zero.err + one.err
    assert "packing resumes" in zero.out
    assert launch(sys.executable, ROOT / "scripts/pack_images.py", *words, "DATA.MAX_BAD=1").out.count("already") == 1
    zero, one = both("-keep")
    assert (zero.code, one.code) == (2, 2)
    assert "has a data set packed" in zero.err
    assert one.err == "", "rank 0 says it for all"
