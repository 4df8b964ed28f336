"""benchmark_amp.py: contenders alternate, and failures are reported."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from bench.benchmark_amp.command import main, measure
from bench.benchmark_amp.plan import AGAIN, Plan, Results
from bench.benchmark_amp.sessions import Metrics
from tools.common.turns import Budget
from utils.errors import TrainingError


class Turns:
    """Contenders with given durations, the order of their turns, and a time that passes only during turns."""

    def __init__(self) -> None:
        self.now = 0.0
        self.order: list[str] = []
        self.closed: list[str] = []

    def plan(self, rounds: int, failure: BaseException | str | None = None, **seconds: float) -> Plan:
        """With a `failure`, a contender "b" that raises it, or fails for that reason."""
        contenders: Any = {name: Fake(self, name, each) for name, each in seconds.items()}
        failing = {} if failure is None else {"b": Fake(self, "b", failure)}
        return Plan(contenders | failing, rounds, {}, "a device", "none")


@dataclass
class Fake:
    """A contender in this process."""

    turns: Turns
    name: str
    outcome: float | str | BaseException

    def turn(self) -> Metrics:
        self.turns.order.append(self.name)
        if isinstance(self.outcome, BaseException):
            raise self.outcome
        if isinstance(self.outcome, str):
            return {"failed": self.outcome}
        self.turns.now += self.outcome
        return {"seconds": self.outcome + 0.1 * len(self.turns.order)}

    def close(self) -> None:
        self.turns.closed.append(self.name)


@pytest.fixture
def turns(monkeypatch: pytest.MonkeyPatch) -> Turns:
    turns = Turns()
    monkeypatch.setattr("tools.common.turns.time.monotonic", lambda: turns.now)
    return turns


def report(results: Results) -> str:
    rows = [["", "seconds"], *([name, results.cell(name, "seconds")] for name in results.turns)]
    return "\n".join(results.report("How long", rows, [results.control_line("a", "seconds")]))


def test_every_other_round_is_reversed(turns: Turns) -> None:
    results = measure("amp", turns.plan(3, a=1, b=2, c=3), Budget(100), None)
    assert turns.order == ["a", "b", "c", "c", "b", "a", "a", "b", "c"]
    assert turns.closed == ["a", "b", "c"]
    assert [len(metrics) for metrics in results["turns"].values()] == [3, 3, 3]
    assert not results["cut"]


def test_budget_ends_the_turns(turns: Turns, tmp_path: Path) -> None:
    path, plan = tmp_path / "f.json", turns.plan(3, a=1, b=2, c=3)
    cut = measure("amp", plan, Budget(13.5), path)
    assert turns.order == ["a", "b", "c", "c", "b", "a", "a"]
    assert cut["cut"]
    assert json.loads(path.read_text(encoding="utf-8")) == cut
    with pytest.raises(TrainingError, match="-budget_min"):
        measure("amp", plan, Budget(-1), None)


def test_failed_contender_is_reported_and_not_retried(turns: Turns) -> None:
    results = measure("amp", turns.plan(3, "out of memory", a=1), Budget(100), None)
    assert turns.order == ["a", "b", "a", "a"]
    with pytest.raises(TrainingError, match="out of memory"):
        measure("amp", turns.plan(3, "out of memory"), Budget(100), None)
    results["left_out"] = {"c": "this CPU has none", "d": "this CPU has none"}
    results["turns"].pop("b")
    assert "not measured: `c`, `d`: this CPU has none" in report(results)


def test_interrupt_keeps_finished_turns_in_the_file(turns: Turns, tmp_path: Path) -> None:
    path = tmp_path / "f.json"
    with pytest.raises(KeyboardInterrupt):
        measure("amp", turns.plan(2, KeyboardInterrupt(), a=1), Budget(100), path)
    assert len(json.loads(path.read_text(encoding="utf-8"))["turns"]["a"]) == 1
    assert turns.closed == ["a", "b"]


def test_report_has_command_machine_date_and_noise(turns: Turns) -> None:
    words = ["amp", "-iters", "3", "-amp"]
    results = measure("amp", turns.plan(1, None, **{"a": 1, "a" + AGAIN: 2}), Budget(100), None, words)
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
        (["amp", "-amp", "bf16", "AMP.CUSTOM_BLACK_LIST=[sofmax]"], ["'sofmax'", "Did you mean softmax"]),
        (["amp", "-amp", "fp8", "AMP.LEVEL=O2"], ["fp8 works with AMP.LEVEL O1 only"]),
        (["amp", "-eval"], ["-eval", "leave it out, since the tool trains"]),
        (["amp", "-batch_size", "auto"], ["BATCH_SIZE auto", "give a number"]),
        (["precisions", "-modes", "bf17"], ["'bf17'", "Did you mean bf16"]),
        (["precisions", "-modes", "tf32"], ["-modes tf32", "Ampere"]),
        (["settings", "-try", "SPEED=plan"], ["SPEED", "got plan."]),
        (["timm", "-precisions", "bf17"], ["-precisions bf17", "'bf17'. Did you mean bf16? Known: fp32,bf16,fp16."]),
        (["timm", "TRAIN.MODEL_EMA=false"], ["TRAIN.MODEL_EMA: this table has a value of its own for all loops"]),
        (["timm", "-model", "vit_huge_patch14_224", "-image_size", "32"], ["not divisible"]),
        (["simplenet", "-cfg", "nowhere.yaml"], ["nowhere.yaml"]),
    ],
    ids=lambda value: " ".join(value[:3]),
)
def test_bad_input_is_refused(capsys: pytest.CaptureFixture[str], words: list[str], said: list[str]) -> None:
    assert main([*words, *(["-device", "cpu"] if "-cfg" not in words else [])]) == 2
    output = capsys.readouterr().err
    assert all(word in output for word in said), output
