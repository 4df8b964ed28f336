"""The tables of benchmark_amp.py. A new one is one file with a TABLE, and one line here."""

from __future__ import annotations

from scripts import benchmark_amp_modes, benchmark_amp_simplenet, benchmark_amp_windows
from scripts.benchmark_amp_frame import Table

TABLES: dict[str, Table] = {
    table.name: table
    for table in (
        benchmark_amp_windows.TABLE,
        benchmark_amp_modes.TABLE,
        benchmark_amp_simplenet.TABLE,
    )
}
