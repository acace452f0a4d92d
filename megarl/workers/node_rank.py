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
        missing = [name for name in ("NODE_RANK", "MASTER_ADDR") if name not in environ]
        if missing:
            raise UserError(
                f"NNODES is set, but {missing[0]} is not: a run on several nodes needs NNODES, NODE_RANK and "
                "MASTER_ADDR"
            )
        rank, count = _integer(environ, "NODE_RANK"), _integer(environ, "NNODES")
        if not 0 <= rank < count:
            raise UserError(f"NODE_RANK = {rank}, but NNODES = {count}: ranks go from 0 to NNODES - 1")
        node = NodeRank(rank, count, environ["MASTER_ADDR"], _port(environ))
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
        port = _integer(environ, "MASTER_PORT")
        if not 1 <= port < 65535:
            raise UserError(f"MASTER_PORT = {port}: expected a port from 1 to 65534; the next one is used too")
        return port
    if "SLURM_JOB_ID" in environ:
        return FIRST_OF_SLURM + 2 * int(environ["SLURM_JOB_ID"]) % FIRST_OF_SLURM
    return PORT


def _integer(environ: Mapping[str, str], name: str) -> int:
    if not re.fullmatch("[0-9]{1,5}", environ[name]) or int(environ[name]) > 65535:
        raise UserError(f"{name} = {environ[name][:40]!r}: expected an integer from 0 to 65535")
    return int(environ[name])


def first_host(nodelist: str) -> str:
    """The first host of a Slurm list: ``gpu[07-09,12],login1`` -> ``gpu07``."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])+", nodelist)
    if not first:
        raise UserError(f"no host in the Slurm node list {nodelist!r}")
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", first[0])
