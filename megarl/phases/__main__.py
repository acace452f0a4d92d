"""``python -m megarl.phases PHASE RUN_DIR STAGE``: one process of a phase in a new interpreter (a cold start)."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from megarl.linux import die_with_parent
from megarl.phases import PHASES
from megarl.phases.entry import run_process


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("phase", choices=PHASES)
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("stage", type=int)
    arguments = parser.parse_args()
    sys.exit(run_process(arguments.phase, arguments.run_dir, arguments.stage))


if __name__ == "__main__":
    os.dup2(2, 1)  # stdout and stderr go to the same log
    die_with_parent(int(os.environ["MEGARL_AGENT_PID"]))  # first, because imports take seconds
    # forks do not inherit this, so repeat it in each of them, such as the writers of a checkpoint
    os.register_at_fork(after_in_child=die_with_parent)
    main()
