"""Finds out which node of a run this is, from the environment variables of a Slurm step or of torchrun."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from megarl.errors import UserError

PORT = 29500  # as torchrun's
FIRST_OF_SLURM = 15000  # and so many ports, two for each job: all below those that Linux gives to whoever asks for any


@dataclass(frozen=True)
class NodeRank:
    """The rank of this agent's node among ``count`` nodes, and the address and port of the store on the first node."""

    rank: int = 0
    count: int = 1
    address: str = "127.0.0.1"
    port: int = PORT


def find_node_rank(environ: Mapping[str, str]) -> NodeRank:
    """The rank from ``NNODES NODE_RANK MASTER_ADDR``, else from the Slurm step; a single node where neither is set.

    Without ``MASTER_PORT`` the port is torchrun's, or in a Slurm job one that follows from the job's number, so that
    jobs that share a node have different ones. The port after it is used too. `UserError` if variables are missing or
    contradict each other.
    """
    if "NNODES" in environ:
        if missing := {"NODE_RANK", "MASTER_ADDR"} - environ.keys():
            raise UserError(
                f"NNODES is set, but {min(missing)} is not: a run on several nodes needs NODE_RANK and MASTER_ADDR too"
            )
        count = _integer(environ, "NNODES", 1)
        node = NodeRank(_integer(environ, "NODE_RANK", 0, count - 1), count, environ["MASTER_ADDR"], _port(environ))
    elif "SLURM_STEP_NODELIST" in environ:
        count, tasks = int(environ["SLURM_STEP_NUM_NODES"]), int(environ["SLURM_STEP_NUM_TASKS"])
        if tasks != count:
            raise UserError(f"{tasks} tasks on {count} nodes: start one task per node (srun --ntasks-per-node=1)")
        address = environ.get("MASTER_ADDR") or first_host(environ["SLURM_STEP_NODELIST"])
        node = NodeRank(int(environ["SLURM_NODEID"]), count, address, _port(environ))
    else:
        return NodeRank()
    return node if node.count > 1 else NodeRank()


def _port(environ: Mapping[str, str]) -> int:
    if environ.get("MASTER_PORT"):
        return _integer(environ, "MASTER_PORT", 1, 65534)
    if "SLURM_JOB_ID" in environ:
        return FIRST_OF_SLURM + 2 * int(environ["SLURM_JOB_ID"]) % FIRST_OF_SLURM
    return PORT


def _integer(environ: Mapping[str, str], name: str, lowest: int, highest: int = 65535) -> int:
    value = environ[name]
    if not (re.fullmatch("[0-9]{1,5}", value) and lowest <= int(value) <= highest):
        raise UserError(f"{name} = {value[:40]!r}: expected an integer from {lowest} to {highest}")
    return int(value)


def first_host(nodelist: str) -> str:
    """The first host of a Slurm list: ``gpu[07-09,12],login1`` -> ``gpu07``."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])+", nodelist)
    if not first:
        raise UserError(f"no host in the Slurm node list {nodelist!r}")
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", first[0])
