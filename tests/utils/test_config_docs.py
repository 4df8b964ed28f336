"""docs/config.md and configs/schema.json follow the code."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from scripts.dev import make_config_docs
from utils.config.keys import settings

ROOT = Path(__file__).resolve().parents[2]


def test_generated_files_are_current() -> None:
    command = [sys.executable, "scripts/dev/make_config_docs.py", "--check"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout) == (0, "")


def test_reference_has_a_row_for_each_setting() -> None:
    text = make_config_docs.reference()
    missing = [key for key in settings() if f"\n| `{key}` | " not in text]
    assert missing == []
    (teacher,) = (line for line in text.splitlines() if line.startswith("| `TRAIN.TEACHER_MODEL` | text or null |"))
    assert teacher.endswith("xcit, PaddleViT's teacher (docs/distillation.md). |")
    assert "| `AMP.LEVEL` | O0, O1, O2, NAIVE or O3 | `O1` |" in text
    assert "| `DATA.INTERPOLATION` | bicubic or bilinear | `bicubic` |" in text


def test_editor_schema_has_all_keys_and_their_older_forms() -> None:
    schema = json.loads(make_config_docs.editor_schema())

    def keys(model: dict, prefix: str) -> set[str]:
        found = set()
        for name, entry in model["properties"].items():
            inner = [kind["$ref"] for kind in entry.get("anyOf", [entry]) if "$ref" in kind]
            if inner:
                found |= keys(schema["$defs"][inner[0].rpartition("/")[2]], f"{prefix}{name}.")
            else:
                found.add(prefix + name)
        return found

    assert set(settings()) <= keys(schema, "")
    assert {"BASE", "MODEL.TRANS", "MODEL.DROP_PATH"} <= keys(schema, "")
    assert {"type": "boolean"} in schema["properties"]["AMP"]["anyOf"]
    ratio = schema["$defs"]["DataConfig"]["properties"]["CROP_SCALE"]
    assert {"type": "string"} in ratio["anyOf"]
    assert ratio["default"] == [0.05, 1.0]
