"""benchmark_amp.py: contenders alternate, and failures are reported."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tools.benchmark_amp.command import main, measure
from tools.benchmark_amp.plan import AGAIN, Metrics, Plan, Results, Section
from tools.common.turns import Budget
from utils.errors import TrainingError


class Clock:
    """Time that passes only during turns."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("tools.common.turns.time.monotonic", clock.monotonic)
    return clock


class Turns:
    """Contenders with given durations, and the order of their turns."""

    def __init__(self, clock: Clock, **seconds: float) -> None:
        self.order: list[str] = []
        self.closed: list[str] = []
        self.clock = clock
        self.contenders = {name: Fake(self, name, each) for name, each in seconds.items()}

    def plan(self, rounds: int) -> Plan:
        return Plan(self.contenders, rounds, {}, "a device", "none")


class Fake:
    """A contender in this process."""

    def __init__(self, turns: Turns, name: str, seconds: float) -> None:
        self._turns, self._name, self._seconds = turns, name, seconds

    def turn(self) -> Metrics:
        self._turns.order.append(self._name)
        self._turns.clock.now += self._seconds
        return {"seconds": self._seconds + 0.1 * len(self._turns.order)}

    def close(self) -> None:
        self._turns.closed.append(self._name)


class Failing(Fake):
    """A contender that raises an error, or fails with a reason."""

    def __init__(self, turns: Turns, failure: BaseException | str) -> None:
        super().__init__(turns, "b", 0.0)
        self._failure = failure

    def turn(self) -> Metrics:
        super().turn()
        if isinstance(self._failure, str):
            return {"failed": self._failure}
        raise self._failure


def report(results: Results) -> str:
    rows = [["", "seconds"], *([name, results.cell(name, "seconds")] for name in results.turns)]
    return "\n".join(results.report(Section("How long", rows, [results.control_line("a", "seconds")])))


def test_every_other_round_is_reversed(clock: Clock) -> None:
    turns = Turns(clock, a=1, b=2, c=3)
    results = measure("amp", turns.plan(3), Budget(100), None)
    assert turns.order == ["a", "b", "c", "c", "b", "a", "a", "b", "c"]
    assert turns.closed == ["a", "b", "c"]
    assert [len(metrics) for metrics in results["turns"].values()] == [3, 3, 3]
    assert not results["cut"]


def test_budget_ends_the_turns(clock: Clock, tmp_path: Path) -> None:
    path, turns = tmp_path / "f.json", Turns(clock, a=1, b=2, c=3)
    cut = measure("amp", turns.plan(3), Budget(13.5), path)
    assert turns.order == ["a", "b", "c", "c", "b", "a", "a"]
    assert cut["cut"]
    assert json.loads(path.read_text(encoding="utf-8")) == cut


def test_failed_contender_is_reported_and_not_retried(clock: Clock) -> None:
    turns = Turns(clock, a=1)
    alone = {"b": Failing(turns, "out of memory")}
    results = measure("amp", Plan(turns.contenders | alone, 3, {}, "a device", "none"), Budget(100), None)
    assert turns.order == ["a", "b", "a", "a"]
    with pytest.raises(TrainingError, match="out of memory"):
        measure("amp", Plan(alone, 3, {}, "a device", "none"), Budget(100), None)
    results["left_out"] = {"c": "this CPU has none", "d": "this CPU has none"}
    results["turns"].pop("b")
    assert "not measured: `c`, `d`: this CPU has none" in report(results)


def test_no_time_left_is_an_error(clock: Clock) -> None:
    with pytest.raises(TrainingError, match="-budget_min"):
        measure("amp", Turns(clock, a=1).plan(1), Budget(-1), None)


def test_interrupt_keeps_finished_turns_in_the_file(clock: Clock, tmp_path: Path) -> None:
    path, turns = tmp_path / "f.json", Turns(clock, a=1)
    contenders = turns.contenders | {"b": Failing(turns, KeyboardInterrupt())}
    with pytest.raises(KeyboardInterrupt):
        measure("amp", Plan(contenders, 2, {}, "a device", "none"), Budget(100), path)
    assert len(json.loads(path.read_text(encoding="utf-8"))["turns"]["a"]) == 1
    assert turns.closed == ["a", "b"]


def test_report_has_command_machine_date_and_noise(clock: Clock) -> None:
    words = ["amp", "-iters", "3", "-amp"]
    results = measure("amp", Turns(clock, **{"a": 1, "a" + AGAIN: 2}).plan(1), Budget(100), None, words)
    output = report(results)
    assert "python scripts/benchmark_amp.py amp -iters 3 -amp" in output
    assert f"a device, torch {results['versions']['torch']}" in output
    assert results["date"] in output
    # 2.2 / 1.1
    assert "control: `a` against itself: 2.00 (2.00 to 2.00); ratios within this range are noise" in output


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["amps"], ["amps", "Did you mean amp?"]),
        (["amp", "-iters", "0"], ["-iters 0", "from 1"]),
        (["amp", "-budget_min", "no"], ["-budget_min no", "above 0"]),
        (["amp", "-json", "a.txt"], ["-json a.txt", "a.json"]),
        (["amp", "-eval"], ["-eval", "leave it out, since the tool trains"]),
        (["amp", "-batch_size", "auto"], ["BATCH_SIZE auto", "give a number"]),
        (["precisions", "-modes", "bf17"], ["'bf17'", "Did you mean bf16"]),
        (["precisions", "-modes", "tf32"], ["-modes tf32", "Ampere"]),
        (["timm", "-model", "vit_huge_patch14_224", "-image_size", "32"], ["not divisible"]),
        (["simplenet", "-cfg", "nowhere.yaml"], ["nowhere.yaml"]),
    ],
    ids=lambda value: " ".join(value[:3]),
)
def test_bad_input_is_refused(capsys: pytest.CaptureFixture[str], words: list[str], said: list[str]) -> None:
    assert main([*words, *(["-device", "cpu"] if "-cfg" not in words else [])]) == 2
    output = capsys.readouterr().err
    assert all(word in output for word in said), output


def test_help_lists_tables_and_flags(capsys: pytest.CaptureFixture[str]) -> None:
    for words, said in ((["-h"], ["amp", "timm"]), (["simplenet", "-h"], ["-width N", "-budget_min M"])):
        with pytest.raises(SystemExit) as left:
            main(words)
        assert left.value.code == 0
        output = capsys.readouterr().out
        assert all(word in output for word in said), output
