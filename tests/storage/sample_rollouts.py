"""Groups whose content depends only on their id, and a writer of a stage that can be killed."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path

import numpy as np

from megarl.storage.rollouts import Group, Response, RolloutStore, RolloutWriter, is_sealed, seal

POLICY = {"weights_hash": "b3" * 32, "logprob_mode": "processed"}


def make_group(group_id: int, responses: int = 4, longest: int = 10) -> Group:
    rng = np.random.default_rng(group_id)

    def response() -> Response:
        n = int(rng.integers(1, longest + 1))
        tokens, logprobs = rng.integers(0, 39, n).astype(np.int32), -rng.exponential(1.0, n).astype(np.float32)
        reward, reason = float(rng.random()), str(rng.choice(["stop", "length"]))
        return Response(tokens, logprobs, reward, reason, int(rng.integers(3)))

    prompt = rng.integers(0, 39, rng.integers(1, 9)).astype(np.int32)
    return Group(group_id, prompt, tuple(response() for _ in range(responses)))


def with_experts(group: Group, shape: tuple[int, int] = (3, 2), dtype: type = np.int8) -> Group:
    """The group with random routed experts; -1 stands for an expert that the engine does not know."""
    rng = np.random.default_rng(group.group_id)

    def recorded(response: Response) -> Response:
        rows = len(group.prompt_tokens) + len(response.tokens) - 1
        return replace(response, routed_experts=rng.integers(-1, np.iinfo(dtype).max, (rows, *shape), dtype, True))

    return replace(group, responses=tuple(map(recorded, group.responses)))


def as_bytes(group: Group) -> tuple:
    """A value that is equal for two groups only if they are equal bit for bit."""

    def exact(value: object) -> object:
        return (value.dtype.str, value.shape, value.tobytes()) if isinstance(value, np.ndarray) else repr(value)

    responses = [[exact(value) for value in vars(response).values()] for response in group.responses]
    return group.group_id, exact(group.prompt_tokens), responses


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def write_stage(directory: Path, groups: int, chunk: int, acknowledged: Path | None = None) -> None:
    """Fill a stage like a rollout phase: make the missing chunks, append each of them, and seal the stage.

    acknowledged: a file that gets the first group id of each chunk as soon as its append has returned.
    Two writers take turns, so that sealing has ledgers to merge; one of them writes routed experts.
    """
    if is_sealed(directory):
        return
    with RolloutWriter(directory, **POLICY) as even, RolloutWriter(directory, **POLICY, writer=1) as odd:
        for start in RolloutStore(directory).missing(range(groups))[::chunk]:
            made = [make_group(i) for i in range(start, start + chunk)]
            if start // chunk % 2:
                odd.append(list(map(with_experts, made)))
            else:
                even.append(made)
            if acknowledged:
                with open(acknowledged, "a") as file:
                    file.write(f"{start}\n")
    seal(directory, range(groups))


def write_stage_dying_at(call: int, directory: Path, groups: int, chunk: int, acknowledged: Path) -> None:
    """Like `write_stage`, but killed at its ``call``-th system call that changes or syncs a file.

    Calls count from 0. A write is killed after half of its data.
    """
    remaining = call

    def deadly(function, half_done):
        def wrapper(*args):
            nonlocal remaining
            remaining -= 1
            if remaining < 0:
                half_done(*args)
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args)

        return wrapper

    pwrite = os.pwrite
    for name in ("fsync", "replace", "ftruncate", "unlink"):
        setattr(os, name, deadly(getattr(os, name), lambda *_: None))
    os.pwrite = deadly(pwrite, lambda fd, data, offset: pwrite(fd, data[: len(data) // 2], offset))
    write_stage(directory, groups, chunk, acknowledged)
