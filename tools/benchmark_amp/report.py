"""Reports of benchmark_amp.py: text for the terminal, Markdown for the docs."""

from __future__ import annotations

from tools.benchmark_amp.results import Results
from tools.benchmark_amp.table import Table
from tools.common.tables import at_commit, in_columns, in_markdown, source
from utils.text import counted


def lines(table: Table, results: Results) -> list[str]:
    """The report for the terminal."""
    text: list[str] = []
    for section in table.sections(results):
        text += ["", section.title, *in_columns(section.rows), *(f"  {note}" for note in section.notes)]
    notes = (*results.images_lines(), *results.failures(), results.machine(), results["command"])
    return [*text, "", *(f"  {note}" for note in notes)]


def markdown(table: Table, results: Results, link: str) -> str:
    """The report for a page of the docs. `link`: the -json file."""
    text: list[str] = []
    for section in table.sections(results):
        text += [f"{section.title}:", "", *in_markdown(section.rows), ""]
        text += [*(f"- {note}" for note in section.notes), ""] if section.notes else []
    if notes := [*results.images_lines(), *results.failures()]:
        text += [*(f"- {line}" for line in notes), ""]
    rounds = counted(results["rounds"], "round")
    rounds += ", fewer where the time ran out" if results["cut"] else ""
    text.append(
        f"Contenders alternate, {rounds}. Measured on {results.machine()}{at_commit(results)}: "
        f"`{results['command']}`. {source(link)}"
    )
    return "\n".join(text) + "\n"
