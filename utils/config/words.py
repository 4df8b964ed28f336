"""Words errors, notes and docs/config.md about settings: their types, rules as sentences, and suggestions.

It is imported only when there is something to report.
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
    """Return the JSON schema of every setting, by dotted key."""
    config_schema = Config.model_json_schema()
    schemas = {}
    for key in settings():
        # Follow the key through the sections, from the outermost: the entry of a section refers to a schema in $defs.
        section_schema = config_schema
        *section_names, name = key.split(".")
        for section_name in section_names:
            definition = section_schema["properties"][section_name]["$ref"].rpartition("/")[2]
            section_schema = config_schema["$defs"][definition]
        schemas[key] = section_schema["properties"][name]
    return schemas


def allowed(key: str) -> str:
    """A setting's type in words: 'whole number >= 1', 'auto, fp16 or bf16'."""
    return either(_kinds(_properties()[key]))


def choices(key: str) -> list[str]:
    """The words that a setting allows; empty if it allows other values than words."""
    schema = _properties()[key]
    words: list[str] = []
    for branch in schema.get("anyOf", [schema]):
        words += _words(branch)
    return words


def _words(schema: dict[str, Any]) -> list[str]:
    """The words that a JSON schema allows; empty if it allows other values than words."""
    if "enum" in schema:
        return [str(word) for word in schema["enum"]]
    if "const" in schema:
        return [str(schema["const"])]
    return []


def _kinds(schema: dict[str, Any]) -> list[str]:
    """List the kinds of values that a JSON schema allows, in words: ["whole number >= 1", "null"]."""
    if "anyOf" in schema:
        kinds: list[str] = []
        for branch in schema["anyOf"]:
            description = branch.get("description")
            # The description of a type is made for this list; that of a union is the setting's own.
            if description and "anyOf" not in branch:
                kinds.append(description)
            else:
                kinds += _kinds(branch)
        return kinds
    words = _words(schema)
    if words:
        return words
    json_type = schema["type"]
    if json_type == "boolean":
        return ["true", "false"]
    if json_type == "array":
        return [f"list of {_items(schema)}"]
    names = {"integer": "whole number", "number": "number", "string": "text", "null": "null"}
    return [names[json_type] + _limits(schema)]


def _items(schema: dict[str, Any]) -> str:
    """Describe the items of an array in words: 'numbers >= 0'."""
    if "prefixItems" in schema:  # a pair
        limits = {_limits(item) for item in schema["prefixItems"]}
        # Limits that differ between the two are left out.
        return "two numbers" + (limits.pop() if len(limits) == 1 else "")
    item = schema["items"]
    if item["type"] == "array":
        return f"lists of {_items(item)}"
    words = _words(item)
    if words:  # The items are words of a list, such as names of layers.
        return either(words)
    names = {"integer": "whole numbers", "number": "numbers", "string": "names"}
    return names[item["type"]] + _limits(item)


def _limits(schema: dict[str, Any]) -> str:
    """The limits of a number or text, with a blank before: ' >= 0 and < 1'; '' without limits."""
    signs = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}
    limits = [f"{sign} {schema[name]:g}" for name, sign in signs.items() if name in schema]
    if "maxLength" in schema:
        limits.append(f"of at most {schema['maxLength']} characters")
    return " " + " and ".join(limits) if limits else ""


def suggest(key: str, translation: str = "") -> str:
    """Suggest a key of ours for an unknown key: ' Did you mean DATA.BATCH_SIZE?'; '' if none is close.

    The first of these counts: keys of the same name in any section, longer names in the section of the unknown key,
    `translation`, and a similar spelling.

    translation: our key for a key of another program; '' if unknown
    """
    all_keys = settings() | sections()
    name = key.rpartition(".")[2].upper()

    # A key of the same name may be in another section. The one in the outermost section is the most likely.
    same_name = [k for k in all_keys if k.rpartition(".")[2] == name]
    if same_name:
        fewest_dots = min(k.count(".") for k in same_name)
        return f" Did you mean {either([k for k in same_name if k.count('.') == fewest_dots])}?"

    # In its own section, a key may have a longer name.
    section = canonical(key).rpartition(".")[0]
    key_in_section = {k.rpartition(".")[2]: k for k in all_keys if k.rpartition(".")[0] == section}
    longer_keys = [k for k in key_in_section.values() if k.endswith(f"_{name}")]
    if longer_keys:
        return f" Did you mean {either(longer_keys)}?"

    # Similar spellings: in the same section, of the whole key, and in any section
    similar_in_section = key_in_section.get(closest(name, key_in_section) or "")
    similar_key = similar_in_section or closest(key, all_keys)
    key_by_name = {k.rpartition(".")[2]: k for k in all_keys}
    match = translation or similar_key or key_by_name.get(closest(name, key_by_name) or "")
    return f" Did you mean {match}?" if match else ""


def expected(key: str, value: Any) -> str:
    """Say what a setting takes, and that it got this value: 'expected whole number >= 1, got 0.'."""
    if value is None or is_no_value(value):
        return f"expected {allowed(key)}, got no value; leave the key out to get its default"
    suggestion = nearest(value, choices(key)) if isinstance(value, str) else ""
    return f"expected {allowed(key)}, got {_source_text(value)}.{suggestion}"


def _source_text(value: Any) -> str:
    """A value as its file or command line has it, on one line of at most 300 characters."""
    if isinstance(value, list):
        text = f"[{', '.join(map(_source_text, value))}]"
    else:
        text = str(value).translate(IN_LINE)
    return text if len(text) <= 300 else f"{text[:300]}..."


def rule_in_words(rule: Rule) -> str:
    """Describe a rule in a sentence for docs/config.md: 'fsdp: needs TRAIN.LOSS=ce or bce if EVAL=false.'

    In this rule, `at` is "fsdp", `kind` is "needs", `others` are ("TRAIN.LOSS=ce|bce",), and `when` is "EVAL=false".
    """
    text = f"{rule.kind} {either(_conditions_in_words(rule.others))}"
    if rule.when:
        text += f" if {_conditions_in_words([rule.when])[0]}"
    if rule.at:
        values = either(rule.at.split("|"))
        return f"{values}: {text}."
    return f"{text[0].upper()}{text[1:]}."


def rule_error(key: str, rule: Rule, read: Read) -> str:
    """Compose the error about a broken rule, without the key at its beginning."""
    value = one_line(read(key))
    if rule.wanted:
        needed = _conditions_in_words(rule.others)
        advice = rule.do or f"set {needed[0]} too, or leave {key} out"
        return f"{value} needs {either(needed)}: {rule.why}; {advice}"
    advice = rule.do or f"leave {key} out"
    return f"{value} is not possible with {_holding_conditions(rule, read)}: {rule.why}; {advice}"


def rule_note(key: str, rule: Rule, read: Read) -> str:
    """Compose the line for the log about a setting that has no effect by a rule.

    For example, 'DIST.HSDP has no effect: DIST.STRATEGY is ddp, not fsdp', or 'KEY has no effect with OTHER on'.
    """
    # Without `wanted`, the rule's conditions must not hold, and some hold. Otherwise one must hold, and none does.
    if not rule.wanted:
        note = f"{key} has no effect with {_holding_conditions(rule, read)}"
        return f"{note}: {rule.why}" if rule.why else note
    unmet = []
    for condition in rule.others:
        condition_key, _, values = condition.partition("=")  # KEY or KEY=a|b
        text = f"{condition_key} is {one_line(read(condition_key))}"
        if values:
            text += f", not {either(values.split('|'))}"
        unmet.append(text)
    note = f"{key} has no effect: {' and '.join(unmet)}"
    return f"{note}; {rule.why}" if rule.why else note


def size_problems(config: Config) -> Iterator[str]:
    """Yield problems of the starts in TRAIN.SIZE_SCHEDULE; engine/preflight.py checks its last size."""
    # With NUM_EPOCHS auto, the number is not known yet: the starts, which are fractions then, are those of one epoch.
    train = config.TRAIN.with_auto_epochs(1)
    steps = train.SIZE_SCHEDULE
    epochs = f"TRAIN.NUM_EPOCHS {config.TRAIN.NUM_EPOCHS}"  # as the user set it, perhaps auto
    starts = [train.epochs_before(start) for start, _ in steps]
    are_rising = all(start < next_start for start, next_start in pairwise(starts))
    if starts[0] != 0 or not are_rising or starts[-1] >= train.NUM_EPOCHS:
        yield (
            f"{one_line(steps)}: the first start must be 0, and each later start above the previous one and below "
            f"{epochs}, as in [[0, 160], [0.75, 224]]; a start below 1 is a fraction of the run"
        )


def _conditions_in_words(conditions: Sequence[str]) -> list[str]:
    """Put conditions into words: `TRAIN.LOSS=ce|bce` as 'TRAIN.LOSS=ce or bce', `KEY!=a` as 'KEY other than a'.

    conditions: texts of the form KEY, KEY=a|b or KEY!=a|b
    """
    in_words = []
    for condition in conditions:
        key, sign, values = condition.partition("=")
        is_negated = key.endswith("!")
        if is_negated:
            key = key.rstrip("!")
            sign = " other than "
        in_words.append(f"{key}{sign}{either(values.split('|'))}")
    return in_words


def _holding_conditions(rule: Rule, read: Read) -> str:
    """List the conditions of a rule that hold, with the values of their settings: 'MODEL.FREEZE [backbone] and EVAL'.

    Conditions that hold because a setting is false or empty are left out: nobody would name `EVAL false`.
    """
    conditions = list(rule.others)
    if rule.when:
        conditions.append(rule.when)
    in_words = []
    for condition in conditions:
        key = condition.partition("=")[0].rstrip("!")  # of KEY, KEY=a|b or KEY!=a|b
        value = read(key)
        if value and holds(condition, read):
            in_words.append(key if value is True else f"{key} {one_line(value)}")
    return " and ".join(in_words)
