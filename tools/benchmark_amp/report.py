"""Reports of benchmark_amp.py: text for the terminal, Markdown for the docs."""

from __future__ import annotations

from tools.benchmark_amp.results import Results
from tools.benchmark_amp.table import Table
from tools.common.results.section import for_docs, for_terminal, in_list
from tools.common.tables import at_commit, source
from utils.text import counted


def lines(table: Table, results: Results) -> list[str]:
    """The report for the terminal."""
    notes = (*results.images_lines(), *results.failures(), results.machine(), results["command"])
    return [*for_terminal(table.sections(results)), "", *(f"  {note}" for note in notes)]


def markdown(table: Table, results: Results, link: str) -> str:
    """The report for a page of the docs. `link`: the -json file."""
    text = for_docs(table.sections(results)) + in_list([*results.images_lines(), *results.failures()])
    rounds = counted(results["rounds"], "round")
    rounds += ", fewer where the time ran out" if results["cut"] else ""
    text.append(
        f"Contenders alternate, {rounds}. Measured on {results.machine()}{at_commit(results)}: "
        f"`{results['command']}`. {source(link)}"
    )
    return "\n".join(text) + "\n"
