"""Mutants for scripts/dev/mutate.py: which lines of the product to change, and how.

A mutant changes one expression or statement of one line in a function. It is known by the line's text, so that another
commit, where the file has moved, can be given the same one.
"""

from __future__ import annotations

import ast
import random
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOMS = ("engine", "datasets", "models", "utils", "tools")
NOT_ON_A_CPU = ("engine/speed/kernels/",)
"""What fast tests cannot run everywhere: kernels for a GPU."""
FOR_A_GPU = "cuda"
"""A line with this text is left out, too."""
MOST_PER_FILE = 2
SHORTEST = 12
"""Characters of a line: a shorter one says too little to be found again."""

FLIPPED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.GtE,
    ast.GtE: ast.Lt,
    ast.Gt: ast.LtE,
    ast.LtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
}


class Mutant(NamedTuple):
    """A changed line; `file` and `line` are those of the commit that it was chosen in."""

    file: str
    line: int
    kind: str
    before: str
    after: str


class Place(NamedTuple):
    file: str
    line: int


def product_files(code: Path) -> list[Path]:
    files = [path for room in ROOMS for path in sorted((code / room).rglob("*.py"))]
    return [path for path in files if not path.relative_to(code).as_posix().startswith(NOT_ON_A_CPU)]


def product_lines(code: Path) -> dict[str, list[Place]]:
    """Each line's text, without its indentation -> where it is."""
    places: defaultdict[str, list[Place]] = defaultdict(list)
    for path in product_files(code):
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
            places[line.strip()].append(Place(path.relative_to(code).as_posix(), number))
    return places


def find_line(code: Path, mutant: Mutant) -> Place | None:
    """Where a commit has the line of a mutant; None if nowhere, or in several places."""
    found = product_lines(code).get(mutant.before, [])
    return found[0] if len(found) == 1 else None


def mutated(source: str, mutant: Mutant, line: int) -> str:
    lines = source.splitlines(keepends=True)
    lines[line - 1] = lines[line - 1].replace(mutant.before, mutant.after)
    return "".join(lines)


def choose(code: Path, count: int, seed: int, also: dict[str, list[Place]] | None = None) -> list[Mutant]:
    """`count` mutants, of each kind as many; `also`: only of lines that another commit has."""
    chance, places = random.Random(seed), product_lines(code)
    of_kind: defaultdict[str, list[Mutant]] = defaultdict(list)
    for path in product_files(code):
        for mutant in mutants_of(path.read_text(encoding="utf-8"), path.relative_to(code).as_posix()):
            unique = len(places[mutant.before]) == 1 and (also is None or len(also.get(mutant.before, [])) == 1)
            if unique and len(mutant.before) >= SHORTEST and FOR_A_GPU not in mutant.before:
                of_kind[mutant.kind].append(mutant)
    for mutants in of_kind.values():
        chance.shuffle(mutants)
    chosen: list[Mutant] = []
    taken: Counter[str] = Counter()
    while len(chosen) < count and any(of_kind.values()):
        for kind in sorted(of_kind):
            while of_kind[kind] and len(chosen) < count:
                mutant = of_kind[kind].pop()
                source = (code / mutant.file).read_text(encoding="utf-8")
                if taken[mutant.file] < MOST_PER_FILE and is_python(mutated(source, mutant, mutant.line)):
                    taken[mutant.file] += 1
                    chosen.append(mutant)
                    break
    return chosen


def mutants_of(source: str, file: str) -> Iterator[Mutant]:
    """All mutants of a file; of a few the changed line is not Python."""
    lines = source.splitlines()
    for function in ast.walk(ast.parse(source)):
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        for node in parts_of(function.body):
            for kind, part, changed in changes(node):
                if part.lineno != part.end_lineno:
                    continue
                line = lines[part.lineno - 1]
                before, after = line.strip(), with_change(line, part, changed).strip()
                if after != before:
                    yield Mutant(file, part.lineno, kind, before, after)


def parts_of(body: list[ast.stmt]) -> Iterator[ast.AST]:
    """Statements and expressions, without texts, annotations, what is raised, and the functions inside."""
    waiting: list[ast.AST] = list(body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.JoinedStr | ast.Raise):
            continue
        yield node
        if isinstance(node, ast.AnnAssign):
            waiting += [node.value] if node.value else []
        else:
            waiting += ast.iter_child_nodes(node)


def changes(node: ast.AST) -> Iterator[tuple[str, ast.stmt | ast.expr, str]]:
    """(kind, what is changed, its new text)."""
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        flipped = FLIPPED[type(node.ops[0])]()
        yield "comparison", node, ast.unparse(ast.Compare(node.left, [flipped], node.comparators))
    elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub) and not joins(node):
        swapped = ast.Sub() if isinstance(node.op, ast.Add) else ast.Add()
        yield "sign", node, ast.unparse(ast.BinOp(node.left, swapped, node.right))
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool | int | float):
        yield "constant", node, repr(not node.value if isinstance(node.value, bool) else 2 * node.value or 1)
    elif isinstance(node, ast.Return) and node.value is not None and ast.unparse(node.value) != "None":
        yield "return", node, "return None"
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        yield "call", node, "pass"
    elif isinstance(node, ast.If | ast.While | ast.IfExp) and not isinstance(node.test, ast.Compare):
        yield "condition", node.test, f"not ({ast.unparse(node.test)})"


def joins(node: ast.BinOp) -> bool:
    """Whether a sum is one of texts or lists."""
    parts = (node.left, node.right)
    return any(
        isinstance(part, ast.JoinedStr | ast.List | ast.Tuple | ast.ListComp)
        or (isinstance(part, ast.Constant) and isinstance(part.value, str))
        or (isinstance(part, ast.BinOp) and joins(part))
        for part in parts
    )


def with_change(line: str, node: ast.stmt | ast.expr, changed: str) -> str:
    """The line with another text for a node; Python counts columns in bytes."""
    text = line.encode()
    return (text[: node.col_offset] + changed.encode() + text[node.end_col_offset :]).decode()


def is_python(source: str) -> bool:
    try:
        ast.parse(source)
    except SyntaxError:
        return False
    return True
