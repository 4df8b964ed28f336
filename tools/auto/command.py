"""Find a good model for your images in a given time, and evaluate it.

    python scripts/auto.py /data/flowers -max_time 0:30:00 -output runs/flowers
    python scripts/auto.py /data/flowers -max_time 2:00:00 -weights resnet18=r.safetensors,vit_tiny_patch16_224
    python scripts/auto.py /data/flowers -max_time 0:10:00 -image_size 96 -device cpu -output runs/flowers

Five stages, each of which prints what it has decided: the images are divided, unless they have a test split; linear
probes compare pretrained models in folds of the training images; those that cannot be told apart are fine-tuned, and
compared on validation images; the winner is trained on training and validation images together; it is evaluated on the
test images, which nothing has looked at before.

The same command goes on after an interruption, with the time that is left; -max_time may then be another.
The flags and settings of main_single_gpu.py are given to all runs. With -ngpus N, up to N of the comparing runs train
side by side, and the last one trains in N processes.
docs/auto.md explains the answer.

Exit codes: 0 done, 1 a training failed, 2 an error found before, 130 interrupted.
"""

from __future__ import annotations

from pathlib import Path

from tools.common.command_line import Tool, check_one_process, tool
from tools.common.output_file import if_interrupted, results_folder
from utils.errors import EXIT_DONE, UserError
from utils.flags import Flag, Positional
from utils.log import log

OWN = (
    Flag(
        "weights",
        "models to compare: names of timm or MODEL=FILE, separated by commas; MODEL@96 is a model at this image size",
        "A,B",
        default_text="four models that suit the device",
    ),
    Flag("output", "folder of all results", "DIR", default=Path("output/auto"), kind=Path),
)
TOOL = Tool(
    "auto.py",
    __doc__,
    OWN,
    (Positional("data", "DATA", "folder or table of the images"),),
    one_label="auto.py compares models by their accuracy, with one label per image",
)
REFUSED = {
    "DATA.DATA_PATH": "name the data without a flag",
    "DATA.FOLD": "leave it out, since the images are divided once",
    "DATA.KEEP_TEST": "leave it out, since a test split is always kept for the end",
    "MODEL.NAME": "list models in -weights",
    "MODEL.PRETRAINED": "list weights in -weights",
    "MODEL.RESUME": "leave it out: the same command goes on where it was interrupted",
    "TRAIN.NUM_EPOCHS": "give -max_time, into which the epochs are fitted",
}
"""Settings that the tool makes itself -> what to do instead"""


@tool
def main(argv: list[str]) -> int:
    """Read the command line, go through the stages that are not done yet, and return the exit code."""
    line = TOOL.read(argv)
    check_one_process("auto.py")

    from engine.machine.device import each_device, pick_device
    from engine.measure.meters import seconds_of
    from tools.auto.answer import answer
    from tools.auto.candidates import ON_CPU, ON_GPU, RECIPE, find_candidates
    from tools.auto.data import divide
    from tools.auto.record import Record
    from tools.auto.search import Search
    from tools.compare.plan import check_given
    from tools.compare.runs import terminating
    from utils.config import load_config
    from utils.distributed.world import ALONE
    from utils.record.folder_lock import FolderLock

    check_given(line, REFUSED)
    if not line.given_by("MAX_TIME"):
        raise UserError("-max_time HH:MM:SS is missing: give the time that everything may take, such as 0:30:00.")
    settings = load_config(line.run.cfg or RECIPE, line.run.flags, line.run.words).config
    is_cpu = pick_device(settings.DEVICE, ALONE).type == "cpu"
    candidates, missing = find_candidates(line.asked.weights, ON_CPU if is_cpu else ON_GPU)
    config = next(iter(candidates.values())).load(line)
    devices = each_device(config) if line.given_by("NGPUS") else [None]
    out = results_folder(line.asked.output).resolve()
    given = {key: f"{value}" for key, (value, _) in line.run.flags.items()} | line.run.words
    given.pop("MAX_TIME")
    if line.run.cfg is not None:
        given["-cfg"] = f"{line.run.cfg}"
    asked = {"data": f"{Path(line.asked.data).absolute()}", "weights": line.asked.weights, "settings": given}
    assert config.MAX_TIME is not None, "checked above"
    with terminating(), FolderLock() as lock:
        record = Record(out, asked, seconds_of(config.MAX_TIME), lock)
        search = Search(line, record, candidates, missing, devices)
        if "answer" in record.content["stages"]:
            log.info("%s: all was done by an earlier call, and is shown again; another -output begins anew.", out)
        if_interrupted.append("given again, the same command goes on")
        try:
            record.stage("data", lambda: divide(config, search.table))
            record.stage("probes", search.probe_all)
            record.stage("trials", search.try_out)
            record.stage("final", search.train_final)
            record.stage("answer", lambda: answer(search))
        finally:
            record.save()  # the time that is used, also where this call is interrupted
    return EXIT_DONE
