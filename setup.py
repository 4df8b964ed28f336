"""Where the files of the wheel go: `vitamp/` is the package, and the program is a folder of its own in it.

So its packages `datasets` and `utils` are no top-level packages, and shadow nobody's. All else is in pyproject.toml.
"""

import tempfile

from setuptools import find_namespace_packages, setup
from setuptools.command.build_py import build_py

PROGRAM = "vitamp.program"
ROOMS = ("configs", "datasets", "docs", "engine", "models", "scripts", "tools", "utils")
LEFT_OUT = ("*__pycache__*", "docs.results*", "scripts.kubernetes*", "scripts.slurm*")
MAIN = ("main_single_gpu", "main_multi_gpu")
PAGES = ["README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md"]
DATA = ["*.yaml", "*.json", "*.html", "*.md", "*.svg"]


class BuildProgram(build_py):
    def find_package_modules(self, package: str, package_dir: str) -> list[tuple[str, str, str]]:
        """(package, module, file). The top folder may have files of the user's own."""
        found = super().find_package_modules(package, package_dir)
        return [module for module in found if package != PROGRAM or module[1] in MAIN]


rooms = find_namespace_packages(include=[name for room in ROOMS for name in (room, f"{room}.*")], exclude=LEFT_OUT)
packages = [f"{PROGRAM}.{room}" for room in rooms]
# A folder of its own for each build: files of an earlier one would get into the wheel.
with tempfile.TemporaryDirectory() as build:
    setup(
        packages=["vitamp", PROGRAM, *packages],
        package_dir={PROGRAM: "."},
        package_data={"vitamp": ["py.typed"], PROGRAM: PAGES, **dict.fromkeys(packages, DATA)},
        options={"build": {"build_base": build}},
        cmdclass={"build_py": BuildProgram},
    )
