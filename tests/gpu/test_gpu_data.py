"""How images come to the GPU: from its own memory, from loading processes through page-locked memory; and the average
that stays in the host's."""

from pathlib import Path

import pytest
import torch

from tests.engine.small import build, windows
from tests.gpu.runs import KIND, PLACE, SMALL, Train, apart, far
from tests.program import save_image

DESCENT = ("TRAIN.OPTIMIZER.NAME=SGD", "TRAIN.BASE_LR=0.05", "SPEED=+fused")


@pytest.fixture
def photographs(tmp_path: Path) -> list[str]:
    """JPEGs of noise, two classes; the words that take them for data."""
    for number in range(40):
        part, label = "val" if number % 5 == 0 else "train", "ab"[number % 2]
        save_image(tmp_path / "photographs" / part / label / f"{number}.jpg", seed=number, size=(72, 60))
    place = f"DATA.DATA_PATH={tmp_path / 'photographs'}"
    sizes = ("DATA.IMAGE_SIZE=32", "DATA.IMAGE_CHANNELS=3", "MODEL.PATCH_SIZE=8", "MODEL.NUM_CLASSES=2")
    batch = ("DATA.BATCH_SIZE=8", "DATA.BATCH_SIZE_EVAL=8", "TRAIN.NUM_EPOCHS=3")
    return ["DATA.DATASET=imagefolder", place, *sizes, *batch]


def test_small_images_lie_where_they_are_computed_with(small: Path) -> None:
    ready = build(small, PLACE, DATA__SHIFT=0.1)
    assert ready.train_set.in_memory
    assert {tensor.device for tensor in (ready.train_set.images, ready.val_set.labels)} == {PLACE}  # pyright: ignore[reportAttributeAccessIssue]
    (_, batch), *_ = next(windows(ready))
    assert {tensor.device for tensor in batch} == {PLACE}


def test_moved_about_they_are_those_of_a_cpu(small: Path) -> None:
    words: dict[str, object] = {"DATA__SHIFT": 0.1, "DATA__ROTATE": 15, "DATA__ZOOM": 0.1}
    batches = []
    for place in (PLACE, torch.device("cpu")):
        (_, batch), *_ = next(windows(build(small, place, DEVICE=place.type, **words)))
        batches.append(batch)
    here, there = batches
    assert torch.equal(here.indices.cpu(), there.indices)
    assert torch.equal(here.labels.cpu(), there.labels)
    assert (here.images.cpu().int() - there.images.int()).abs().max() <= 1, "where a half is rounded"


def test_photographs_come_through_loading_processes(train: Train, photographs: list[str]) -> None:
    """However many load; and erased and mixed on the GPU, by random numbers that go with the place in the run."""
    mixed = ("TRAIN.MIXUP_ALPHA=0.8", "TRAIN.CUTMIX_ALPHA=1.0", "TRAIN.RANDOM_ERASE_PROB=0.25", "DETERMINISTIC=true")
    words = (*photographs, *DESCENT, *mixed, "-amp", "bf16", "TRAIN.ACCUM_ITER=2")
    none, three = (train(f"of{number}", *words, "-num_workers", number) for number in (0, 3))
    assert len(none.losses) == 6
    assert none.of("train") == three.of("train")
    assert none.of("val") == three.of("val")
    assert none.of("epoch") == three.of("epoch")


def test_what_is_copied_ahead_is_what_is_trained_on(train: Train, photographs: list[str]) -> None:
    """A batch that were used before its copy had arrived would give other losses than a CPU's."""
    here = train("here", *photographs, *DESCENT, "-num_workers", 2)
    there = train("there", *photographs, *DESCENT, "-num_workers", 2, "-device", "cpu")
    assert apart(here.losses, there.losses) < 1e-4


def test_a_batch_in_flight_is_not_written_over(tmp_path: Path, photographs: list[str]) -> None:
    """The GPU is kept busy, so that copies of later batches are made while it has not come to the first."""
    path = tmp_path / "photographs.yaml"
    path.write_text(SMALL, encoding="utf-8")
    words = dict(word.replace(".", "__", 1).split("=", 1) for word in photographs)
    ready = build(path, PLACE, **words, DATA__NUM_WORKERS=2)
    size = 4096 if KIND == "cuda" else 8
    busy = torch.ones(size, size, device=PLACE)
    seen = []
    for window in ready.train_loader.epoch(1):
        for _, batch in window:
            for _ in range(20):
                busy = busy @ busy * 0
            seen.append((batch.indices.clone(), batch.images.float().mean((1, 2, 3))))
    ready.train_loader.close()
    assert len(seen) == 4
    for indices, means in seen:
        again = ready.train_set.__getitems__([(1, index) for index in indices.tolist()])
        assert means.tolist() == pytest.approx(again.images.float().mean((1, 2, 3)).tolist(), rel=1e-5)


@pytest.mark.parametrize("amp", ["off", "fp16"])
def test_an_average_in_the_hosts_memory(train: Train, amp: str) -> None:
    words = ("-amp", amp, *DESCENT, "TRAIN.MODEL_EMA=true", "TRAIN.MODEL_EMA_DECAY=0.9", "AMP.INIT_LOSS_SCALING=1e7")
    here, home = (train(f"{where}", *words, f"TRAIN.MODEL_EMA_FORCE_CPU={where}") for where in ("false", "true"))
    assert home.losses == pytest.approx(here.losses, rel=1e-3)
    assert far(home.weights("ema.safetensors"), here.weights("ema.safetensors")) < 1e-4
    assert far(home.weights("ema.safetensors"), home.weights()) > 1e-4, "an average is not the weights"
    assert home.of("val")[-1]["ema_loss"] == pytest.approx(here.of("val")[-1]["ema_loss"], rel=1e-2)
    on = train("true", *words, "TRAIN.MODEL_EMA_FORCE_CPU=true", "-resume", "auto", updates=16)
    assert len(on.losses) == 16
