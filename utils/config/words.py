"""What errors, notes and the reference say about settings: types in words, rules as sentences, suggestions.

It is imported where there is something to say.
"""

from collections.abc import Iterator, Sequence
from functools import cache
from itertools import pairwise
from typing import Any

from utils.config.fields import Read, Rule, holds
from utils.config.keys import canonical, sections, settings
from utils.config.kinds import is_no_value, one_line
from utils.config.schema import Config
from utils.errors import closest, either, nearest
from utils.log import IN_LINE


@cache
def _properties() -> dict[str, dict[str, Any]]:
    """The JSON schema of every setting."""
    schema = Config.model_json_schema()
    found = {}
    for key in settings():
        entry: dict[str, Any] = {"$ref": "Config"}
        for name in key.split("."):
            model = schema["$defs"].get(entry["$ref"].rpartition("/")[2], schema)
            entry = model["properties"][name]
        found[key] = entry
    return found


def allowed(key: str) -> str:
    """A setting's type in words: 'whole number >= 1', 'auto, fp16 or bf16'."""
    return either(_kinds(_properties()[key]))


def choices(key: str) -> list[str]:
    """The words that a setting allows, if it allows only some."""
    entry = _properties()[key]
    words: list[str] = []
    for kind in entry.get("anyOf", [entry]):
        words += _words(kind)
    return words


def _words(kind: dict[str, Any]) -> list[str]:
    if "enum" in kind:
        return [str(word) for word in kind["enum"]]
    return [str(kind["const"])] if "const" in kind else []


def _kinds(entry: dict[str, Any]) -> list[str]:
    if "anyOf" in entry:
        kinds: list[str] = []
        for part in entry["anyOf"]:
            description = part.get("description")  # in words, of a kind that has one
            kinds += [description] if description and "anyOf" not in part else _kinds(part)
        return kinds
    words = _words(entry)
    if words:
        return words
    kind = entry["type"]
    if kind == "boolean":
        return ["true", "false"]
    if kind == "array":
        return [f"list of {_items(entry)}"]
    names = {"integer": "whole number", "number": "number", "string": "text", "null": "null"}
    return [names[kind] + _limits(entry)]


def _items(entry: dict[str, Any]) -> str:
    if "prefixItems" in entry:
        limits = {_limits(item) for item in entry["prefixItems"]}
        return "two numbers" + (limits.pop() if len(limits) == 1 else "")
    item = entry["items"]
    if item["type"] == "array":
        return f"lists of {_items(item)}"
    words = _words(item)
    if words:
        return either(words)
    names = {"integer": "whole numbers", "number": "numbers", "string": "names"}
    return names[item["type"]] + _limits(item)


def _limits(entry: dict[str, Any]) -> str:
    signs = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}
    limits = [f"{sign} {entry[name]:g}" for name, sign in signs.items() if name in entry]
    if "maxLength" in entry:
        limits.append(f"of at most {entry['maxLength']} characters")
    return " " + " and ".join(limits) if limits else ""


def suggest(key: str, theirs: str = "") -> str:
    """' Did you mean DATA.BATCH_SIZE?' for an unknown key, searched in all sections; '' if none is close.

    `theirs`: our key for this one of another program, which counts more than a similar spelling.
    """
    known = settings() | sections()
    name = key.rpartition(".")[2].upper()
    same_name = [k for k in known if k.rpartition(".")[2] == name]
    if same_name:
        fewest_dots = min(k.count(".") for k in same_name)
        return f" Did you mean {either([k for k in same_name if k.count('.') == fewest_dots])}?"
    section = canonical(key).rpartition(".")[0]
    inside = {k.rpartition(".")[2]: k for k in known if k.rpartition(".")[0] == section}
    ending = [k for k in inside.values() if k.endswith(f"_{name}")]
    if ending:
        return f" Did you mean {either(ending)}?"
    similar = inside.get(closest(name, inside) or "") or closest(key, known)
    anywhere = {k.rpartition(".")[2]: k for k in known}
    match = theirs or similar or anywhere.get(closest(name, anywhere) or "")
    return f" Did you mean {match}?" if match else ""


def expected(key: str, value: Any) -> str:
    if value is None or is_no_value(value):
        return f"expected {allowed(key)}, got no value; leave the key out to get its default"
    suggestion = nearest(value, choices(key)) if isinstance(value, str) else ""
    return f"expected {allowed(key)}, got {_source_text(value)}.{suggestion}"


def _source_text(value: Any) -> str:
    """A value as its file or command line has it."""
    text = f"[{', '.join(map(_source_text, value))}]" if isinstance(value, list) else str(value).translate(IN_LINE)
    return text if len(text) <= 300 else f"{text[:300]}..."


def rule_in_words(rule: Rule) -> str:
    """The rule as a sentence for the reference."""
    text = f"{rule.kind} {either(_conditions(rule.others))}"
    if rule.when:
        text += f" if {_conditions([rule.when])[0]}"
    if rule.at:
        return f"{either(rule.at.split('|'))}: {text}."
    return f"{text[0].upper()}{text[1:]}."


def rule_error(key: str, rule: Rule, read: Read) -> str:
    value = one_line(read(key))
    if rule.wanted:
        others = _conditions(rule.others)
        do = rule.do or f"set {others[0]} too, or leave {key} out"
        return f"{value} needs {either(others)}: {rule.why}; {do}"
    do = rule.do or f"leave {key} out"
    return f"{value} is not possible with {_met(rule, read)}: {rule.why}; {do}"


def rule_note(key: str, rule: Rule, read: Read) -> str:
    if not rule.wanted:
        note = f"{key} has no effect with {_met(rule, read)}"
        return f"{note}: {rule.why}" if rule.why else note
    missed = []
    for other in rule.others:
        name, _, values = other.partition("=")
        text = f"{name} is {one_line(read(name))}"
        if values:
            text += f", not {either(values.split('|'))}"
        missed.append(text)
    note = f"{key} has no effect: {' and '.join(missed)}"
    return f"{note}; {rule.why}" if rule.why else note


def size_problems(config: Config) -> Iterator[str]:
    """What is wrong with the starts of a TRAIN.SIZE_SCHEDULE; engine/preflight.py checks its last size."""
    train = config.TRAIN.spanning(1)
    steps = train.SIZE_SCHEDULE
    epochs = f"TRAIN.NUM_EPOCHS {config.TRAIN.NUM_EPOCHS}"
    starts = [train.epochs_before(start) for start, _ in steps]
    if starts[0] != 0 or any(a >= b for a, b in pairwise(starts)) or starts[-1] >= train.NUM_EPOCHS:
        yield (
            f"{one_line(steps)}: the first start must be 0, and each later start above the previous one and below "
            f"{epochs}, as in [[0, 160], [0.75, 224]]; a start below 1 is a fraction of the run"
        )


def _conditions(texts: Sequence[str]) -> list[str]:
    """Conditions in words: DIST.STRATEGY=fsdp, TRAIN.LOSS=ce or bce, MODEL.RESUME other than auto."""
    found = []
    for text in texts:
        key, sign, values = text.partition("=")
        if key.endswith("!"):
            key = key.rstrip("!")
            sign = " other than "
        found.append(f"{key}{sign}{either(values.split('|'))}")
    return found


def _met(rule: Rule, read: Read) -> str:
    """The conditions that hold, with their values, but for TRAINING, which goes without saying."""
    conditions = list(rule.others)
    if rule.when:
        conditions.append(rule.when)
    met = []
    for text in conditions:
        key = text.partition("=")[0].rstrip("!")
        value = read(key)
        if value and holds(text, read):
            met.append(key if value is True else f"{key} {one_line(value)}")
    return " and ".join(met)
