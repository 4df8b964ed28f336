"""Write docs/config.md and configs/schema.json from the settings' schema.

python scripts/dev/make_config_docs.py            write them
python scripts/dev/make_config_docs.py --check    write nothing; exit 1 where one is not current
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from utils.config.families import FAMILIES  # noqa: E402
from utils.config.keys import RENAMED, allowed, default_of, sections, settings  # noqa: E402
from utils.config.schema import Config  # noqa: E402
from utils.config.write import one_line  # noqa: E402

INTRODUCTION = """\
# Settings

[All pages](README.md)

<!-- Made by scripts/dev/make_config_docs.py from schema.py, data.py and model.py in utils/config; change those and run
the script. -->

A run's settings come from five places, each overriding those before it:

1. the defaults below, which `MODEL.TYPE` may choose ([defaults by family](#defaults-by-family));
2. the files a YAML file names under `BASE:` (a list, relative to that file, the last one wins);
3. the YAML file of `-cfg`;
4. flags such as `-batch_size 64` (`-h` lists them);
5. `KEY=VALUE` words on the command line, such as `TRAIN.BASE_LR=1e-4`. A list is written
   `'TRAIN.OPTIMIZER.BETAS=[0.9, 0.98]'`.

`-print_config` shows the result and where each value came from, and every run keeps it as `config.yaml` in its
folder. A key that does not exist, a value of the wrong kind or out of range, and settings that do not fit together
are errors, all reported at once.

## PaddleViT's files

They load as they are: `None`, `(0.9, 0.999)` and `1e-6` mean what they say, `AMP: true` is `AMP.ENABLED: true`, and
the older nesting `MODEL.TRANS.PATCH_SIZE` is read as `MODEL.PATCH_SIZE`. These older names are understood too:

"""

NEXT = """
Next: [recipes.md](recipes.md), the YAML files in `configs/`; [models.md](models.md), which model a config builds.\
"""

FAMILY = """
## Defaults by family

`MODEL.TYPE` chooses the defaults of what nobody sets, as PaddleViT's models have a `config.py` each: an empty cell is
the default of `vit`, which any other word has as well. Whatever a file, a flag or a word sets wins. For grey images
(`DATA.IMAGE_CHANNELS: 1`) mean and standard deviation stay those of `vit`. `-print_config` shows such a value as
`default (swin)`, and a run logs them. `TYPE` alone chooses: `MODEL.NAME` of such a model beside the default `TYPE`
leaves the defaults of `vit`, and the log says so.

A resumed run keeps the defaults it began with, where neither `-cfg` nor the command line sets another value; one line
of the log names them.

"""

EDITORS = """
## Completion in the editor

`configs/schema.json` tells editors the keys, their kinds and descriptions. In VS Code with Red Hat's YAML extension,
let a file in `configs/` begin with

```yaml
# yaml-language-server: $schema=schema.json
```

For a file elsewhere, give the path to `schema.json` from there.
"""


def reference() -> str:
    """docs/config.md"""
    lines = [INTRODUCTION.rstrip("\n"), "", "| older name | today |", "| --- | --- |"]
    lines += [f"| `{old}` | `{new}` |" for old, new in RENAMED.items()]
    lines += ["| `MODEL.MLP_DIM`, beside the width | `MODEL.MLP_RATIO` |"]
    lines += [FAMILY.rstrip("\n"), "", *_families(), EDITORS.rstrip("\n")]
    for section, about in [*sections().items(), ("", "Keys outside the sections, at the left margin of the file.")]:
        lines += [
            "",
            f"## {section or 'Top level'}",
            "",
            about,
            "",
            "| key | takes | default | |",
            "| --- | --- | --- | --- |",
        ]
        lines += [_row(key) for key in settings() if key.rpartition(".")[0] == section]
    return "\n".join([*lines, NEXT]) + "\n"


def _families() -> list[str]:
    """The table of what families have for defaults that are not vit's."""
    others = [family for family, defaults in FAMILIES.items() if defaults]
    keys = [key for key in settings() if any(key in FAMILIES[family] for family in others)]
    rows = [["key", "`vit`", *(f"`{family}`" for family in others)], ["---"] * (2 + len(others))]
    for key in keys:
        cells = [f"`{one_line(FAMILIES[f][key])}`" if key in FAMILIES[f] else "" for f in others]
        rows.append([f"`{key}`", f"`{one_line(default_of(key))}`", *cells])
    return ["| " + " | ".join(row) + " |" for row in rows]


def _row(key: str) -> str:
    field = settings()[key]
    extra: dict[str, Any] = field.json_schema_extra if isinstance(field.json_schema_extra, dict) else {}
    about = field.description or ""
    if why := extra.get("accepted_because"):
        about += f" Without effect: {why}."
    cells = [f"`{key}`", allowed(key), f"`{one_line(default_of(key))}`", about]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def editor_schema() -> str:
    """configs/schema.json"""
    schema = Config.model_json_schema()
    models = schema["$defs"]
    for model in (schema, *models.values()):
        model["properties"] = {name: _as_people_write(entry) for name, entry in model["properties"].items()}
    top = schema["properties"]
    top["AMP"] = {
        "anyOf": [{"$ref": "#/$defs/AmpConfig"}, {"type": "boolean"}],
        "description": top["AMP"]["description"],
    }
    _allow_older_names(models["ModelConfig"])
    return json.dumps(_without_titles(schema), indent=1, ensure_ascii=False) + "\n"


def _as_people_write(entry: dict[str, Any]) -> dict[str, Any]:
    """The loader reads more than the schema's own types: `(0.9, 0.999)`, one number for a list, None."""
    kinds = entry.get("anyOf", [entry])
    more = []
    if any(kind.get("type") == "array" for kind in kinds):
        more += [{"type": "string"}, {"type": "number"}]
    if any(kind.get("type") == "null" for kind in kinds):
        more += [{"const": "None"}]
    if not more:
        return entry
    about = {name: entry[name] for name in entry if name in ("default", "description")}
    bare = [{name: kind[name] for name in kind if name not in (*about, "title")} for kind in kinds]
    return {"anyOf": [*bare, *more], **about}


def _allow_older_names(model: dict[str, Any]) -> None:
    inside = model["properties"]
    older = {old.removeprefix("MODEL."): new.removeprefix("MODEL.") for old, new in RENAMED.items()}
    for old, new in older.items():
        inside[old] = {**inside.get(new, {}), "description": f"Older name of {new}.", "deprecated": True}
    inside["TRANS"] = {"type": "object", "description": "Older nesting: its keys belong to MODEL.", "deprecated": True}


def _without_titles(node: Any) -> Any:
    """Pydantic repeats each key as its title; without them the file is half as long."""
    if isinstance(node, dict):
        return {k: _without_titles(v) for k, v in node.items() if k != "title" or not isinstance(v, str)}
    return [_without_titles(item) for item in node] if isinstance(node, list) else node


def main(arguments: list[str]) -> int:
    if arguments not in ([], ["--check"]):
        print("usage: python scripts/dev/make_config_docs.py [--check]", file=sys.stderr)
        return 2
    stale = []
    for path, text in ((ROOT / "docs/config.md", reference()), (ROOT / "configs/schema.json", editor_schema())):
        if path.exists() and path.read_text(encoding="utf-8") == text:
            continue
        stale.append(str(path.relative_to(ROOT)))
        if not arguments:
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")
    if stale:
        print(f"{'stale' if arguments else 'wrote'}: {', '.join(stale)}")
    return 1 if stale and arguments else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
