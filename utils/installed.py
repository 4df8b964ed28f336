"""Ends the program with one line where packages are missing; the first import of every script.

So it imports the standard library alone, and older Pythons can read it too.
"""

import importlib.util
import sys
from pathlib import Path

NEEDED = ("torch", "torchvision", "timm", "numpy", "PIL", "pydantic", "yaml", "tqdm", "safetensors")
ROOT = Path(__file__).resolve().parents[1]

missing = ["Python 3.11"] if sys.version_info < (3, 11) else []
missing += [name for name in NEEDED if importlib.util.find_spec(name) is None]
if missing:
    own = ROOT / ".venv"
    if (own / "bin" / "activate").is_file() and Path(sys.prefix) != own:
        advice = f"activate the environment: source {own}/bin/activate"
    elif (ROOT / "requirements.txt").is_file():
        advice = f"to install, run: bash {ROOT}/scripts/quickstart.sh (or pip install -r {ROOT}/requirements.txt)"
    else:
        advice = "install vitamp again, with pip and without --no-deps"
    print(f"error: {sys.executable} lacks {', '.join(missing)}; {advice}", file=sys.stderr)
    sys.exit(2)
