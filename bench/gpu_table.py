#!/usr/bin/env python3
"""Show what bench/on_gpu.sh found, as one table in words.

python bench/gpu_table.py on_gpu            # show it
python bench/gpu_table.py on_gpu -write     # put speeds into docs/results and README.md, a profile into docs/results
"""

import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "docs" / "results"
PAGE = ROOT / "README.md"
BEGIN = "<!-- speed on a GPU, from docs/results by bench/gpu_table.py -->"
END = "<!-- end of it -->"
SIZES = ("small", "base", "large")
OUTCOMES = {0: "ok", 124: "did not end in time", 125: "no time was left for it"}


def speeds(results: dict[str, Any], precision: str) -> list[float]:
    """Median images/s of timm's loop, of timm's loop with its fastest flags, and of ours, compiled; [] if one lacks."""
    names = (f"timm, {precision}", f"timm, fused, compiled, {precision}", f"ours, compiled, {precision}")
    turns = [
        [turn["images_per_second"] for turn in results["turns"].get(name, ()) if "failed" not in turn] for name in names
    ]
    return [statistics.median(numbers) for numbers in turns] if all(turns) else []


def model_of(results: dict[str, Any]) -> str:
    return results["settings"].get("MODEL.NAME", "vit_base_patch16_224")


def rows(results: dict[str, Any]) -> list[str]:
    settings = results["settings"]
    model = f"{model_of(results)}, {settings.get('DATA.BATCH_SIZE', 256)}"
    found = []
    for precision in settings["precisions"].split(","):
        if numbers := speeds(results, precision):
            timm, fastest, ours = numbers
            found.append(
                f"| {model} | {precision} | {timm:,.0f} images/s | {fastest:,.0f} | **{ours:,.0f}** | "
                f"{ours / timm:.2f}x, {ours / fastest:.2f}x |"
            )
    return found


def table(files: list[Path]) -> list[str]:
    """The table of README.md, and under it what each row was measured with."""
    every = [json.loads(path.read_text(encoding="utf-8")) for path in files]
    found = [row for results in every for row in rows(results)]
    if not found:
        return []
    command = (
        "python scripts/benchmark_amp.py timm -model MODEL -batch_size N -precisions A,B -compile -timm_train train.py"
    )
    return [
        "| model, batch | precision | timm | timm, fused AdamW, compiled | vitamp, compiled | speed-up over each |",
        "| --- | --- | --- | --- | --- | --- |",
        *found,
        "",
        f"Medians of images/s on one GPU, without dropout, by `{command}`: {measured_with(every)}.",
    ]


def measured_with(every: list[dict[str, Any]]) -> str:
    """What the models were measured with, those alike together."""
    alike: dict[str, list[str]] = {}
    for results in every:
        card = results["device"].removeprefix("cuda: ").partition(",")[0]
        versions = ", ".join(f"{name} {results['versions'][name]}" for name in ("torch", "timm"))
        commit = (results["git"] or {"commit": "unknown"})["commit"][:7]
        words = f"{card}, {versions}, {results['rounds']} rounds, {results['date']}, commit {commit}"
        alike.setdefault(words, []).append(model_of(results))
    return "; ".join(f"{' and '.join(models)}: {words}" for words, models in alike.items())


def write(out: Path) -> None:
    """Keep the results of the speed table, and put it into README.md."""
    here = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.strip()
    for name in (*(f"peers_{size}" for size in SIZES), "levers", "profile"):
        if (new := out / f"{name}.json").exists():
            results = json.loads(new.read_text(encoding="utf-8"))
            if name == "profile" and "H200" not in results["device"]:
                continue  # a trial of the script without a GPU
            if not results["git"] or results["git"]["changed"]:  # the GPU's machine had a copy of this checkout
                results["git"] = {"commit": here, "changed": False}
            kept = RESULTS / f"gpu_{name.removeprefix('peers_')}.json"
            if name == "profile":
                kept = RESULTS / "profile_h200.json"
            kept.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    text = "\n".join([BEGIN, *kept_table(), END])
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    PAGE.write_text(before + text + rest.partition(END)[2], encoding="utf-8")


def kept_table() -> list[str]:
    return table([path for size in SIZES if (path := RESULTS / f"gpu_{size}.json").exists()])


def show(out: Path) -> None:
    print("| part | what | outcome | seconds |\n|---|---|---|---|")
    checks = out / "checks.jsonl"
    for line in checks.read_text(encoding="utf-8").splitlines() if checks.exists() else ():
        check = json.loads(line)
        outcome = OUTCOMES.get(check["code"], f"FAILED with code {check['code']}")
        print(f"| {check['part']} | {check['name']} | {outcome} | {check['seconds']} |")
    for log in sorted(out.glob("*tests.log")):
        lines = log.read_text(encoding="utf-8").splitlines()
        print("", log.stem, *(line for line in lines if line.startswith(("FAILED", "ERROR"))), *lines[-1:], sep="\n")
    print("", *table(sorted(out.glob("peers_*.json"))), sep="\n")
    if (levers := out / "levers.json").exists():
        results = json.loads(levers.read_text(encoding="utf-8"))
        print("", "| levers | images/s |", "|---|---|", sep="\n")
        for name, turns in results["turns"].items():
            numbers = [turn["images_per_second"] for turn in turns if "failed" not in turn]
            failed = next((turn["failed"] for turn in turns if "failed" in turn), "not measured")
            print(f"| {name} | {format(statistics.median(numbers), ',.0f') if numbers else failed} |")
    if (profile := out / "profile.json").exists():
        for model, entry in json.loads(profile.read_text(encoding="utf-8"))["models"].items():
            failed = entry.get("failed") or entry.get("not_grouped")
            said = failed or entry.get("sentence", "no time was left to group its trace")
            print("", f"{model}, batch {entry['batch']}: {said}", sep="\n")


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    show(folder)
    if "-write" in sys.argv[2:]:
        write(folder)
