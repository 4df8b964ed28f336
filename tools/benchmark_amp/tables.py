"""Tables of benchmark_amp.py. To add one, write a file with a TABLE and add two lines here."""

from __future__ import annotations

from tools.benchmark_amp.against_timm.table import TABLE as TIMM
from tools.benchmark_amp.amp import TABLE as AMP
from tools.benchmark_amp.precisions import TABLE as PRECISIONS
from tools.benchmark_amp.scaling import TABLE as SCALING
from tools.benchmark_amp.simplenet import TABLE as SIMPLENET
from tools.benchmark_amp.startup import TABLE as STARTUP
from tools.benchmark_amp.table import Table

TABLES: dict[str, Table] = {table.name: table for table in (AMP, PRECISIONS, SIMPLENET, SCALING, TIMM, STARTUP)}
