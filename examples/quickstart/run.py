"""`make quickstart`: makes the base model if it is missing, trains it with mu-GRPO, prints the gain in accuracy.

python examples/quickstart/run.py [--run-dir runs/quickstart] [--set section.key=value ...]
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def main() -> None:
    os.chdir(ROOT)
    if not (ROOT / "examples/quickstart/base").exists():
        print("Making the base model: a tiny Mixture-of-Experts that spells words backwards, badly (about a minute).")
        made = subprocess.run([sys.executable, "-W", "ignore", "examples/quickstart/make_base.py"])
        if made.returncode:
            sys.exit(made.returncode)
    command = [sys.executable, "-m", "megarl.cli", "train", "examples/quickstart/recipe.toml"]
    command += ["--run-dir", "runs/quickstart", *sys.argv[1:]]  # an option that is given twice: the last one counts
    os.execv(command[0], command)  # so that Ctrl-C and SIGTERM reach the run itself


if __name__ == "__main__":
    main()
