"""The tables of benchmark_amp.py. A new one is a file with a TABLE, and two lines here."""

from __future__ import annotations

from scripts.benchmark_amp_frame import Table
from scripts.benchmark_amp_modes import TABLE as MODES
from scripts.benchmark_amp_peers import TABLE as PEERS
from scripts.benchmark_amp_scaling import TABLE as SCALING
from scripts.benchmark_amp_simplenet import TABLE as SIMPLENET
from scripts.benchmark_amp_startup import TABLE as STARTUP
from scripts.benchmark_amp_windows import TABLE as WINDOWS

TABLES: dict[str, Table] = {
    table.name: table
    for table in (
        WINDOWS,
        MODES,
        SIMPLENET,
        SCALING,
        PEERS,
        STARTUP,
    )
}
