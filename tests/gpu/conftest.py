"""All tests here are marked `gpu`. They are skipped without a GPU, and where an older one lacks what they use."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.gpu.runs import KIND, SMALL, Run, Train, skip_if_missing
from tests.program import Result

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    missing = KIND == "cuda" and not torch.cuda.is_available()
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            item.add_marker(pytest.mark.skipif(missing, reason="there is no GPU here"))  # before any fixture


@pytest.fixture(autouse=True)
def _gpu(request: pytest.FixtureRequest) -> None:
    """Skips by the parameters of a test; `train` does so by the words of a run."""
    parameters = getattr(getattr(request.node, "callspec", None), "params", {})
    skip_if_missing(*parameters.values())


@pytest.fixture
def small(tmp_path: Path) -> Path:
    path = tmp_path / "small.yaml"
    path.write_text(SMALL, encoding="utf-8")
    return path


@pytest.fixture
def train(vitamp: Callable[..., Result], small: Path, tmp_path: Path) -> Train:
    def call(name: str, *words: object, updates: int | None = 12, code: int = 0, **options: object) -> Run:
        skip_if_missing(*words)
        limit = [] if updates is None else [f"TRAIN.MAX_UPDATES={updates}"]
        given = ("-cfg", small, "-output", tmp_path / name, *limit, *words)
        return Run(tmp_path / name, vitamp(*given, code=code, **{"timeout": 240, **options}))

    return call
