"""`imagefolder`: a folder a class, its name is the class's name."""

from __future__ import annotations

from .base import Source
from .folders import check_folders, open_folders

SOURCE = Source(open_folders, check_folders)
