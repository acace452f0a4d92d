"""`make quickstart`: makes the base model if it is missing, trains it with MinPRO, prints the gain in accuracy.

The model and the run are written below the working directory: to `examples/quickstart/base` and `runs/quickstart`.
Options are those of `megarl train`, such as `--run-dir` and `--set`.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent


def main() -> None:
    parser = argparse.ArgumentParser(usage="%(prog)s [OPTIONS]", description=__doc__, allow_abbrev=False)
    _, options = parser.parse_known_args()
    if not Path("examples/quickstart/base").exists():
        print("Making the base model: a tiny Mixture-of-Experts that spells words backwards, badly (about a minute).")
        made = subprocess.run([sys.executable, "-W", "ignore", str(HERE / "make_base.py")])
        if made.returncode:
            sys.exit(made.returncode)
    command = [sys.executable, "-m", "megarl.cli", "train", str(HERE / "recipe.toml"), "--run-dir", "runs/quickstart"]
    command += options  # an option that is given twice: the last one counts
    os.execv(command[0], command)  # so that Ctrl-C and SIGTERM reach the run itself


if __name__ == "__main__":
    main()
