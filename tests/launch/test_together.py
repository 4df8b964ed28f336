"""Ranks that do not belong together are refused before they train; one that dies or hangs is named, and all end."""

import os
import re
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.datasets.shards.tar_files import write_set
from tests.launch.clusters import MULTI
from tests.program import ROOT, Started, run_program
from tests.waiting import free_port, until

HOST = socket.gethostname()
# The program, with a fault in rank 1's fifth update.
FAULTY = f"""\
import os, runpy, sys, time
sys.path.insert(0, {str(ROOT)!r})
import torch
step, calls = torch.optim.AdamW.step, []
def faulty(*args, **kwargs):
    calls.append(1)
    if len(calls) == 5 and ("-rank=1" in sys.argv or os.environ.get("RANK") == "1"):
        fault = os.environ["FAULT"]
        if fault == "raise":
            raise RuntimeError("rank one has had enough")
        if fault == "sleep":
            time.sleep(600)
        if fault == "die before any restart" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            os.kill(os.getpid(), 9)
    return step(*args, **kwargs)
torch.optim.AdamW.step = faulty
runpy.run_path({MULTI!r}, run_name="__main__")
"""
# The program, with an error while it checks the settings.
BROKEN = f"""\
import runpy, sys
sys.path.insert(0, {str(ROOT)!r})
import engine.preflight
def check(*_):
    raise RuntimeError("no way to read the data")
engine.preflight.check = check
runpy.run_path({MULTI!r}, run_name="__main__")
"""
ENDLESS = ("TRAIN.NUM_EPOCHS=100000", "SAVE_FREQ=100000", "REPORT_FREQ=1")


class Ranks:
    def __init__(self, place: Path) -> None:
        self.place, self.port = place, free_port()
        self.run = place / "run"
        self.started: list[Started] = []

    def start(
        self, number: int, *words: object, world: int = 2, by: str = "flags", script: str = MULTI, **env: str
    ) -> Started:
        """`by`: the rank comes from flags, or from environment variables without a launcher."""
        how: tuple[object, ...] = ()
        if by == "flags":
            how = ("-host=localhost", f"-port={self.port}", f"-rank={number}", f"-world_size={world}")
        else:
            names = {"RANK": number, "WORLD_SIZE": world, "MASTER_ADDR": "localhost", "MASTER_PORT": self.port}
            env |= {name: str(value) for name, value in names.items()}
        streams = self.place / f"streams{len(self.started)}"
        streams.mkdir()
        argv = [str(word) for word in ("-cfg", self.place / "tiny.yaml", "-output", self.run, *how, *words)]
        self.started.append(Started(script, argv, ROOT, env, streams))
        return self.started[-1]

    def two(self, *words: object, fault: str = "none") -> tuple[Started, Started]:
        """Two ranks in endless training; the second may have a fault."""
        script = self.place / "faulty.py"
        script.write_text(FAULTY)
        first, second = (self.start(number, *ENDLESS, *words, script=str(script), FAULT=fault) for number in (0, 1))
        return first, second

    def wait_for_updates(self) -> None:
        log = self.run / "log.txt"
        until(lambda: log.exists() and "Step[" in log.read_text(), 100)


@pytest.fixture
def ranks(tiny: Path) -> Iterator[Ranks]:
    running = Ranks(tiny.parent)
    yield running
    for rank in running.started:
        rank.end(120)


def refused(rank: Started, *said: str) -> None:
    done = rank.end(120).expect(2)
    for text in said:
        assert re.search(text, done.err), done.text
    assert done.err.count("error:") == 1


def test_ranks_with_different_settings_are_refused(ranks: Ranks) -> None:
    both = ranks.start(0), ranks.start(1, "TRAIN.BASE_LR=1", "SEED=7")
    for rank in both:
        refused(
            rank,
            rf"rank 1 on {HOST} \(process \d+\) was started with other settings than rank 0 on {HOST}",
            r"TRAIN.BASE_LR is 1.0 there and 0.002 on rank 0; SEED is 7 there and 0 on rank 0\.",
        )
    assert not ranks.run.exists()


def test_ranks_with_different_world_sizes_are_refused(ranks: Ranks) -> None:
    for rank in (ranks.start(0), ranks.start(1, world=3)):
        refused(rank, rf"rank 1 on {HOST} .* was started as one of 3 processes, rank 0 on .* as one of 2")


def test_files_by_machine_need_equally_many_ranks_on_each(ranks: Ranks) -> None:
    words = ("-dataset", "shards", "-data_path", write_set(ranks.place / "set"), "DATA.SAMPLER=by_machine")
    for number, local, size in ((0, "0", "2"), (1, "1", "2"), (2, "0", "1")):
        ranks.start(number, *words, "-num_classes", 3, world=3, LOCAL_RANK=local, LOCAL_WORLD_SIZE=size)
    for rank in ranks.started:
        refused(rank, r"by_machine needs equally many processes on each machine.* Leave DATA\.SAMPLER out\.")


@pytest.mark.slow  # a quicker test refuses ranks with other settings
def test_duplicate_rank_is_refused(ranks: Ranks) -> None:
    first = ranks.start(0, world=3)
    for rank in (ranks.start(1, world=3), ranks.start(1, world=3), first):
        refused(rank, rf"rank 1 on {HOST} .* and rank 1 on {HOST} .* are both rank 1")


@pytest.mark.parametrize("by", ["flags", "variables"])
@pytest.mark.parametrize("unable", [1, 0])
def test_rank_that_cannot_take_part_ends_the_others(ranks: Ranks, unable: int, by: str) -> None:
    """Its problem is found before it joins them."""
    words = {unable: ("-device", "cuda")}
    both = [ranks.start(number, *words.get(number, ()), by=by, CUDA_VISIBLE_DEVICES="") for number in (0, 1)]
    refused(both[unable], "-device cuda: .* sees no GPU here")
    refused(both[1 - unable], rf"rank {unable} on {HOST} \(process \d+\): -device cuda: .* sees no GPU here")


def test_rank_that_fails_before_it_joins_ends_the_others(ranks: Ranks) -> None:
    """By an error of the program's own, too."""
    script = ranks.place / "broken.py"
    script.write_text(BROKEN)
    waiting, broken = ranks.start(0), ranks.start(1, script=str(script))
    refused(waiting, rf"rank 1 on {HOST} \(process \d+\): RuntimeError: no way to read the data")
    assert broken.end(120).code == 1


def test_missing_rank_is_named(ranks: Ranks) -> None:
    rank = ranks.start(0, "DIST.TIMEOUT=0.05")
    refused(rank, r"1 of 2 processes joined within 0.05 minutes \(DIST.TIMEOUT\); missing: rank 1")


@pytest.mark.slow
def test_missing_rank_0_is_reported(ranks: Ranks) -> None:
    rank = ranks.start(1, "DIST.TIMEOUT=0.05")
    refused(rank, rf"rank 1 of 2: rank 0 does not answer at localhost:{ranks.port} \(0.05 minutes, DIST.TIMEOUT\)")


@pytest.mark.parametrize("rank", [0, 1])
def test_unknown_host_is_refused_at_once(tmp_path: Path, tiny: Path, rank: int) -> None:
    """Not after DIST.TIMEOUT, and without torch's stack."""
    by_hand = ("-host", "no-such-host.invalid", "-port", free_port(), "-rank", rank, "-world_size", 2)
    words = ("-cfg", tiny, "-output", tmp_path / "run", *by_hand)
    done = run_program(*words, script="main_multi_gpu.py", streams=tmp_path, code=2)
    assert f"rank {rank} of 2: the host 'no-such-host.invalid' cannot be resolved to an address" in done.err
    assert len(done.err.splitlines()) < 5, done.err


def test_port_in_use_is_reported(ranks: Ranks) -> None:
    with socket.socket(socket.AF_INET6) as listener:
        listener.bind(("::", ranks.port))
        listener.listen()
        rank = ranks.start(0)
        refused(rank, rf"rank 0 cannot listen on port {ranks.port}: .* Try another -port")


@pytest.mark.parametrize(
    ("flags", "env", "said"),
    [
        (["-host", "localhost"], {}, "missing: -port -rank -world_size"),
        ([], {"PMI_RANK": "1", "PMI_SIZE": "4"}, "one of 4 processes"),
        ([], {"RANK": "", "WORLD_SIZE": "2"}, "RANK is '' in the environment: expected a whole number."),
        ([], {"RANK": "0", "WORLD_SIZE": "two"}, "WORLD_SIZE is 'two' in the environment"),
        ([], {"RANK": "2", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}, "RANK 2 is not below"),
        ([], {"SLURM_PROCID": "x", "SLURM_STEP_NUM_TASKS": "2"}, "SLURM_PROCID is 'x' in the environment"),
        ([], {"SLURM_PROCID": "2", "SLURM_STEP_NUM_TASKS": "2"}, "SLURM_PROCID 2 is not below SLURM_STEP_NUM_TASKS 2"),
        ([], {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "99999"}, "'a' and '99999'"),
        ([], {"RANK": "0", "WORLD_SIZE": "2"}, "rank 0 of 2 (RANK, WORLD_SIZE): MASTER_ADDR must be the host"),
    ],
)
def test_incomplete_rank_settings_are_refused(tiny: Path, flags: list[str], env: dict[str, str], said: str) -> None:
    words = ("-cfg", tiny, "-output", tiny.parent / "run", *flags)
    done = run_program(*words, script="main_multi_gpu.py", env=env, streams=tiny.parent, code=2)
    assert said in done.err
    assert len(done.err.splitlines()) < 5, done.err


def test_a_tool_names_a_wrong_rank_in_one_line(tiny: Path) -> None:
    env = {"RANK": "", "WORLD_SIZE": "2"}
    done = run_program("x", script="scripts/auto.py", env=env, streams=tiny.parent)
    assert done.code == 2
    assert done.err.splitlines() == [
        "error: RANK is '' in the environment: expected a whole number. Without a launcher, unset it."
    ]


def test_failing_rank_is_named_in_the_others_terminals(ranks: Ranks) -> None:
    first, second = ranks.two(fault="raise")
    broken, other = second.end(120), first.end(30).expect(1)
    assert broken.code == 1
    assert re.search(rf"rank 1 on {HOST} \(process \d+\) failed:\nTraceback", broken.err)
    assert broken.err.count("RuntimeError: rank one has had enough") == 1
    named = rf"error: rank 1 on {HOST} \(process \d+\) failed: RuntimeError: rank one has had enough. This run ends."
    assert len(re.findall(named, other.err)) == 1, other.text
    assert re.search(named.removeprefix("error: "), (ranks.run / "log.txt").read_text())


@pytest.mark.parametrize("victim", [1, 0])
def test_killed_rank_is_named_within_15_seconds(ranks: Ranks, victim: int) -> None:
    both = ranks.two()
    ranks.wait_for_updates()
    os.kill(both[victim].pid, signal.SIGKILL)
    began = time.monotonic()
    left = both[1 - victim].end(60).expect(1)
    assert time.monotonic() - began < 15
    death = f"rank {victim} on {HOST} (process {both[victim].pid}) died without an error message"
    assert left.err.count(death) == 1, left.err
    assert both[victim].end(10).code == -signal.SIGKILL
    assert (ranks.run / "log.txt").read_text().count(death) == 1


@pytest.mark.slow
def test_hanging_rank_is_named_with_its_place_in_the_code(ranks: Ranks) -> None:
    where = r"faulty.py:\d+ \(faulty\), called from engine/[\w/]+.py:\d+ \(\w+\)"
    for rank in ranks.two("DIST.TIMEOUT=0.1", fault="sleep"):
        done = rank.end(120).expect(1)
        named = rf"error: rank 1 on {HOST} \(process \d+\) has kept the others waiting for 0.1 minutes \(DIST.TIMEOUT\)"
        assert len(re.findall(f"{named}; it is in .*{where}", done.err)) == 1, done.text


@pytest.mark.slow
def test_stopped_rank_is_named(ranks: Ranks) -> None:
    first, second = ranks.two("DIST.TIMEOUT=0.1")
    ranks.wait_for_updates()
    os.kill(second.pid, signal.SIGSTOP)
    done = first.end(60).expect(1)
    assert done.err.count(f"rank 1 on {HOST} (process {second.pid}) has sent no heartbeat for 6 s") == 1, done.text
    assert second.end(60).code == 1, "continued by the watchdog of the other, it ends by itself"
