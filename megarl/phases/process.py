"""The frame around every phase process."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

from megarl.distributed import die_with_agent
from megarl.errors import UserError
from megarl.run_dir import RunDir


def main(phase: Callable[[RunDir, int], None]) -> None:
    """Run one phase for the RUN_DIR and STAGE of the command line; errors reach the launcher through torch's error file."""
    die_with_agent()
    parser = argparse.ArgumentParser()
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("stage", type=int)
    arguments = parser.parse_args()
    torch.set_num_threads(1) if not torch.cuda.is_available() else None
    record(_run)(phase, arguments.run_dir, arguments.stage)


def _run(phase: Callable[[RunDir, int], None], run_dir: Path, stage: int) -> None:
    try:
        phase(RunDir.open(run_dir), stage)
    except UserError as error:
        print(error, file=sys.stderr)
        raise
    finally:
        if dist.is_initialized() and sys.exc_info()[0] is None:
            dist.destroy_process_group()
