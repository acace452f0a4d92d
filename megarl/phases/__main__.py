"""``python -m megarl.phases PHASE RUN_DIR STAGE``: one process of a phase with imports of its own (a cold start)."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from megarl.linux import die_with_parent
from megarl.phases.entry import PHASES, run_process


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("phase", choices=PHASES)
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("stage", type=int)
    arguments = parser.parse_args()
    sys.exit(run_process(arguments.phase, arguments.run_dir, arguments.stage))


if __name__ == "__main__":
    os.dup2(2, 1)  # one log
    die_with_parent(int(os.environ["MEGARL_AGENT_PID"]))  # before the seconds that imports take
    # the request is not inherited: also what a library forks, such as the writers of a checkpoint
    os.register_at_fork(after_in_child=die_with_parent)
    main()
