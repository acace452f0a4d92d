"""Runs the processes of phases as forks of one that has imported everything: a phase in a second, not in ten.

Reads one JSON object a line: phase, run, stage, processes, port, attempt. Answers with the process ids, then with the
exit codes. The processes run the code of the phases as the launcher's do; only their start is cheaper.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
from pathlib import Path

from megarl.errors import STOPPED


def import_everything() -> None:
    from megatron.core import jit

    jit.disable_jit_fuser()  # as the CPU backend does before anything else of Megatron is imported
    import megatron.core.dist_checkpointing
    import megatron.core.models.gpt.gpt_layer_specs
    import megatron.core.optimizer  # noqa: F401
    from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3MoeForCausalLM  # noqa: F401

    import megarl.phases.live.trainer
    import megarl.rollout.builtin  # noqa: F401


def phase_process(order: dict, local: int) -> None:
    from megarl.phases.__main__ import _run, die_with_parent

    die_with_parent()
    processes = str(order["processes"])
    os.environ |= {
        "RANK": str(local),
        "LOCAL_RANK": str(local),
        "WORLD_SIZE": processes,
        "LOCAL_WORLD_SIZE": processes,
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(order["port"]),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RUN_ID": f"phase{order['attempt']}",
    }
    _run(order["phase"], Path(order["run"]), order["stage"])


def fork(order: dict, local: int) -> int:
    if pid := os.fork():
        return pid
    code = 1
    try:
        log = os.open(f"{order['run']}/process_{local}.log", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        phase_process(order, local)
        code = 0
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    import_everything()
    for line in sys.stdin:
        order = json.loads(line)
        pids = [fork(order, local) for local in range(order["processes"])]
        print(json.dumps(pids), file=answers, flush=True)
        codes: dict[int, int] = {}
        while len(codes) < len(pids):
            for pid in set(pids) - set(codes):
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    codes[pid] = os.waitstatus_to_exitcode(status)
            if set(codes.values()) - {0, STOPPED}:  # as the launcher: one failed, all end
                for pid in set(pids) - set(codes):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.005)
        print(json.dumps([codes[pid] for pid in pids]), file=answers, flush=True)


if __name__ == "__main__":
    main()
