#!/usr/bin/env python3
"""Kill each trainer within an epoch, resume it by its own flags, and compare it with a run that was not killed.

    python bench/resume_bench.py -timm pytorch-image-models -torchvision vision/references/classification \
        -peers venv/bin/python -json resume.json

-peers: a Python with ultralytics and lightly-train. The commands are in resume_bench.yaml; each takes 4 epochs of 10
updates, is killed by SIGKILL after update 15, and resumes with one process and with two. All are watched in the same
way, from outside: `observe()` runs first in each of their processes. An image's channels are one texture times a colour
of its own, so what a model is given says which images it has, however they are cropped, flipped and normalised.
"""

import argparse
import hashlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
IMAGES = 200
CLASSES = 10
UPDATES = 40
KILLED = 15
LEVELS = np.linspace(0.3, 1.0, 15)
COLOURS = np.array([(1.0, LEVELS[number // 15], LEVELS[number % 15]) for number in range(IMAGES)])
IMAGENET_STD = (0.229, 0.224, 0.225)


def observe() -> None:
    """In a trainer's process: log the images, losses and weights of each update, and kill it after one of them."""
    import torch
    from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

    asked = json.loads(os.environ["RESUME_BENCH"])
    log = Path(asked["log"])
    std = np.array(asked["std"])
    now: dict[str, Any] = {"images": [], "losses": []}
    updates = 0
    given = False
    exec(asked["first"])

    def see(_module: Any, inputs: tuple[Any, ...]) -> None:
        nonlocal given
        batch = inputs[0] if inputs else None
        if given or not torch.is_grad_enabled() or not isinstance(batch, torch.Tensor):
            return
        if batch.ndim == 4 and batch.shape[1] == 3:
            spread = batch.detach().double().std((2, 3)).numpy() * std
            ratios = spread / spread[:, :1]
            now["images"] += np.abs(ratios[:, None] - COLOURS).sum(2).argmin(1).tolist()
            given = True

    def backward(tensors: Any, *args: Any, **kwargs: Any) -> None:
        nonlocal given
        now["losses"].append(float(tensors[0] if isinstance(tensors, tuple | list) else tensors))
        given = False
        real_backward(tensors, *args, **kwargs)

    def weights(optimizer: torch.optim.Optimizer) -> np.ndarray:
        trained = [weight.detach().float().flatten() for group in optimizer.param_groups for weight in group["params"]]
        return torch.cat(trained).numpy()

    def before(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        now["before"] = hashlib.sha256(weights(optimizer).tobytes()).hexdigest()

    def after(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        nonlocal updates
        updates += 1
        found = weights(optimizer)
        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        line = now | {"after": hashlib.sha256(found.tobytes()).hexdigest()}
        with (log / f"{rank}.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
        if rank == 0:
            np.save(log / "weights.npy", found)
        now.update(images=[], losses=[])
        if updates == asked["killed"]:
            os.kill(os.getpid(), signal.SIGKILL)

    real_backward = torch.autograd.backward
    torch.autograd.backward = backward
    torch.nn.modules.module.register_module_forward_pre_hook(see)
    register_optimizer_step_pre_hook(before)
    register_optimizer_step_post_hook(after)


def make_images(folder: Path) -> None:
    from PIL import Image

    random = np.random.default_rng(0)
    for number, colour in enumerate(COLOURS):
        texture = random.integers(60, 220, (16, 16, 1)).repeat(4, 0).repeat(4, 1)
        image = Image.fromarray((texture * colour).round().astype(np.uint8))
        for split in ("train", "val") if number < 40 else ("train",):
            place = folder / split / f"class{number % CLASSES}"
            place.mkdir(parents=True, exist_ok=True)
            image.save(place / f"{number:03d}.png")


class Bench:
    """One trainer, with the folders of its runs."""

    def __init__(self, trainer: dict[str, Any], place: Path, folder: Path, data: Path) -> None:
        self.trainer = trainer
        self.folder = folder
        self.data = data
        self.python, self.cwd = (place, ROOT) if trainer["place"] == "peers" else (Path(sys.executable), place)
        (folder / "sitecustomize.py").write_text(f"import sys\nsys.path.append({str(ROOT / 'bench')!r})\n{HOOK}")

    def run(self, name: str, way: str, killed: int = 0) -> list[dict[str, Any]]:
        """Run a command of the trainer; returns what each update was, over all processes."""
        log = self.folder / name
        at = self.folder / "run"
        trainer = self.trainer
        log.mkdir()
        at.with_suffix(".py").write_text(trainer.get("file", ""))
        words = {"one": self.python, "two": f"{self.python} -m torch.distributed.run --standalone --nproc_per_node 2"}
        places = {"data": self.data, "out": at}
        command = trainer[way].format(command=trainer["command"].format(**places), **places, **words)
        asked = {"log": str(log), "killed": killed, "std": trainer.get("std", IMAGENET_STD)}
        asked["first"] = trainer.get("first", "")
        own = {"RESUME_BENCH": json.dumps(asked), "PYTHONPATH": str(self.folder), "OMP_NUM_THREADS": "1"}
        into: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        done = subprocess.run(shlex.split(command), check=False, cwd=self.cwd, env=os.environ | own, **into)
        if done.returncode != (-signal.SIGKILL if killed else 0):
            raise RuntimeError(f"{command}\nexit code {done.returncode}\n{done.stdout[-6000:]}")
        ranks = [[json.loads(line) for line in path.open()] for path in sorted(log.glob("*.jsonl"))]
        updates = list(zip(*ranks, strict=True))
        return [{**of[0], "images": [image for one in of for image in one["images"]]} for of in updates]

    def resume(self, way: str, whole: list[dict[str, Any]], killed: list[dict[str, Any]]) -> dict[str, Any]:
        """Resume the killed run, and compare it with the one that was not killed."""
        if way not in self.trainer:
            return {"not": self.trainer["two_not"]}
        shutil.rmtree(self.folder / "run")
        shutil.copytree(self.folder / "left", self.folder / "run")
        resumed = self.run(way, way)
        held = [number for number, one in enumerate(killed, 1) if one["after"] == resumed[0]["before"]]
        kept = held[0] if held else UPDATES - len(resumed)
        updates = killed[:kept] + resumed
        wanted, shown = (Counter(image for one in run for image in one["images"]) for run in (whole, updates))
        places = range(min(len(whole), len(updates)))
        others = [at + 1 for at in places if sorted(whole[at]["images"]) != sorted(updates[at]["images"])]
        losses = [at + 1 for at in places if whole[at]["losses"] != updates[at]["losses"]]
        one, other = (np.load(self.folder / name / "weights.npy") for name in ("whole", way))
        return {
            "resumed_from_update": kept,
            "weights_are_those_of_that_update": bool(held),
            "updates_repeated": KILLED - kept,
            "updates_in_all": len(updates),
            "images_lost": (wanted - shown).total(),
            "images_repeated": (shown - wanted).total(),
            "first_update_with_other_images": others[0] if others else None,
            "first_other_loss": losses[0] if losses and way == "resume" else None,
            "weights_equal": bool(np.array_equal(one, other)),
            "weights_differ_by": float(f"{np.abs(one - other).max() / np.abs(one).max():.2g}"),
        }

    def measure(self) -> dict[str, Any]:
        whole = self.run("whole", "start")
        shutil.rmtree(self.folder / "run")
        killed = self.run("killed", "start", KILLED)
        (self.folder / "run").rename(self.folder / "left")
        (self.folder / "run").mkdir()
        same = all(one["after"] == other["after"] for one, other in zip(whole, killed, strict=False))
        counts = Counter(image for one in whole for image in one["images"])
        if len(whole) != UPDATES or [*counts.values()] != [4] * IMAGES:
            raise RuntimeError(f"{len(whole)} updates, not {UPDATES}; times that each image was given: {counts}")
        one, two = (self.resume(way, whole, killed) for way in ("resume", "two"))
        return {"equal_until_the_kill": same, "resumed": one, "resumed_with_two_processes": two}

    def versions(self) -> dict[str, str]:
        names = self.trainer["packages"]
        ask = f"import importlib.metadata as m, json; print(json.dumps({{n: m.version(n) for n in {names}}}))"
        return json.loads(subprocess.check_output([self.python, "-c", ask], text=True))


HOOK = 'import os\nif "RESUME_BENCH" in os.environ:\n    import resume_bench\n    resume_bench.observe()\n'


def main() -> None:
    import yaml

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-timm", type=Path, help="a checkout of timm, for its train.py")
    parser.add_argument("-torchvision", type=Path, help="references/classification of a checkout of torchvision")
    parser.add_argument("-peers", type=Path, help="a Python that has ultralytics and lightly-train")
    parser.add_argument("-json", type=Path, required=True)
    asked = parser.parse_args()
    trainers = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())
    held = json.loads(asked.json.read_text()) if asked.json.exists() else {"trainers": {}}
    for name, trainer in trainers.items():
        place = ROOT if trainer["place"] == "vitamp" else getattr(asked, trainer["place"])
        if place is None or name in held["trainers"]:
            continue
        with tempfile.TemporaryDirectory() as scratch:
            make_images(data := Path(scratch, "data"))
            (folder := Path(scratch, "runs")).mkdir()
            bench = Bench(trainer, place.absolute(), folder, data)
            row = held["trainers"][name] = bench.measure() | {"versions": bench.versions(), **trainer}
        asked.json.write_text(json.dumps(held, indent=1) + "\n")
        print(name, json.dumps(row, indent=1), flush=True)


if __name__ == "__main__":
    main()
