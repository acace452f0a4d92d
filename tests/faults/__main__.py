"""Damages every kind of file of a run directory, makes system calls on files fail, and checks that runs recover.

A run of two stages, staged or live, is stopped in the middle of the second stage, damaged and started again. It must
end with the same bytes as an undisturbed run, or exit with 2 and one message that says what is wrong. If a system call
fails once, the start must end with these bytes, or exit with 1 or 2 and a message (for a full disk with 2, and the
message must say so); the start after that must end with these bytes. ``python -m tests.faults`` prints one row for each
fault. The argument is a regular expression: only faults whose names match somewhere are tried.
"""

from __future__ import annotations

import errno
import itertools
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from tests.faults.kills import assert_same_live_run
from tests.helpers import megarl, write_laboratory
from tests.phases.commands import settings, train
from tests.phases.test_kill import assert_same_run, kill_at

SETTINGS = {False: settings("eval.every=2")}  # evaluates before the first stage and after the last
SETTINGS[True] = settings("eval.every=2", "schedule.kind=live", "schedule.delay=1", "schedule.sync_every=2")  # live
CHECKPOINT, POLICY, ROLLOUTS = "stages/001/checkpoints/update_000004", "stages/001/policy", "stages/001/rollouts"
END = "stages/000/checkpoints/update_000006"
FILES = (
    *("recipe.toml", "prompts.json", "metrics.jsonl", "events.jsonl", ".lock"),
    "logs/001_optimize/attempt_0/rank_0000.log",
    "stages/000/policy/model.safetensors",
    *(f"stages/000/rollouts/{name}" for name in ("SEALED", "ledger.jsonl")),  # of a finished stage
    *(f"{POLICY}/{name}" for name in ("config.json", "megarl.json", "model.safetensors")),
    # the groups of the first are trained already
    *(f"{ROLLOUTS}/{name}" for name in ("w00000_00000024.arrow", "w00000_00000040.arrow", "ledger.jsonl", "SEALED")),
    *(f"{CHECKPOINT}/{name}" for name in (".metadata", "__0_0.distcp", "common.pt", "manifest.json", "metrics.jsonl")),
)
# where a live run differs: rollouts that are not sealed, and its trainer reads checkpoints
LIVE_CHECKPOINT = "stages/001/checkpoints/update_000002"
LIVE_FILES = ("metrics.jsonl", f"{ROLLOUTS}/*.arrow", f"{ROLLOUTS}/ledger.jsonl", f"{LIVE_CHECKPOINT}/__0_0.distcp")


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


KINDS: dict[str, Callable[[Path], object]] = {
    "one bit flipped": flip,
    "cut in half": lambda path: os.truncate(path, path.stat().st_size // 2),
    "emptied": lambda path: os.truncate(path, 0),
    "removed": lambda path: path.unlink(),
    "a directory instead": lambda path: (path.unlink(), path.mkdir()),
    "another type": lambda path: path.write_text("[3]\n"),
    "NUL at the end": lambda path: path.write_bytes(path.read_bytes()[:-16] + bytes(16)),
}
WHOLE_RUNS: dict[str, Callable[[Path], object]] = {
    "all checkpoints of the stage damaged": lambda run: [flip(p) for p in run.glob("stages/001/*/update_*/.metadata")],
    "the last checkpoint of the stage before damaged too": lambda run: [
        flip(p) for p in run.glob("stages/*/checkpoints/update_*/common.pt")
    ],
    "the newest checkpoint half removed": lambda run: [p.unlink() for p in (run / CHECKPOINT).glob("*.distcp")],
    "a checkpoint under another name": lambda run: os.rename(run / CHECKPOINT, run / f"{CHECKPOINT[:-1]}5"),
    "metrics without the stage before": lambda run: subprocess.run(["sed", "-i", "1,6d", run / "metrics.jsonl"]),
    "metrics and their copy damaged": lambda run: [flip(p) for p in run.glob("**/metrics.jsonl")],
    "a recipe with another value": lambda run: (run / "recipe.toml").write_text(
        (run / "recipe.toml").read_text().replace("lr = 0.0002", "lr = 0.0003")
    ),
    "a remedy: the policy deleted": lambda run: shutil.rmtree(run / POLICY),
    "a remedy: the end of the stage before deleted, policy and checkpoints": lambda run: [
        shutil.rmtree(run / path) for path in (END, POLICY, "stages/001/checkpoints")
    ],
    "rows appended to the prompts": lambda run: (run.parent / "prompts.jsonl").write_text(
        (run.parent / "prompts.jsonl").read_text() + '{"prompt": "cc", "answer": "c"}\n'
    ),
}
MORE: dict[str, Callable[[Path], object]] = {  # also for live runs; in staged runs these are remedies
    "the rollouts of the stage before deleted": lambda run: shutil.rmtree(run / "stages/000/rollouts"),
    "the rollouts of the stage deleted": lambda run: shutil.rmtree(run / ROLLOUTS),
    "a seal deleted": lambda run: (run / "stages/000/rollouts/SEALED").unlink(),
}
# (function, part of the path, error number or 0 for half a write, which such call fails, from 1)
WRITTEN = {"/metrics.jsonl": 1, "/events.jsonl": 2, ".arrow": 1, "rollouts/ledger.jsonl": 2, ".SEALED": 1}
WRITTEN |= {".distcp": 2, ".final": 3}
CALLS = [
    *(("write", part, number, n) for part, n in WRITTEN.items() for number in (errno.EIO, errno.ENOSPC, 0)),
    *(("fsync", part, errno.EIO, 1) for part in (".arrow", "metrics.jsonl", "checkpoints/.update", ".final")),
    *(("rename", part, errno.EIO, 1) for part in (".arrow", "SEALED", "checkpoints/update", "/final")),
    *(("open", part, errno.EACCES, 1) for part in (".arrow", "manifest.json", "/metrics.jsonl", "prompts.json")),
    *itertools.product(["open"], ["stages/001/policy/model", "recipe.toml"], [errno.EIO, errno.EMFILE], [1]),
]


@dataclass(frozen=True)
class Trial:
    """One start of a stopped run with a fault: damage to its files, or a system call that fails."""

    name: str
    damage: Callable[[Path], object] | None = None
    call: tuple[str, str, int, int] | None = None
    live: bool = False  # in a live run


def trials() -> list[Trial]:
    at_rest = [Trial(f"{f}: {k}", lambda run, f=f, k=k: KINDS[k](run / f)) for f in FILES for k in KINDS]
    whole = [Trial(name, damage) for name, damage in (WHOLE_RUNS | MORE).items()]
    calls = [
        Trial(f"{name} {part}, call {n}: {errno.errorcode.get(number, 'half')}", None, (name, part, number, n))
        for name, part, number, n in CALLS
    ]
    live = [
        Trial(f"live: {f}: {k}", lambda run, f=f, k=k: KINDS[k](min(run.glob(f))), live=True)
        for f in LIVE_FILES
        for k in KINDS
    ]
    live += [Trial(f"live: {name}", damage, live=True) for name, damage in MORE.items()]
    return [*at_rest, *whole, *calls, *live]


class Laboratory:
    """Undisturbed runs, staged and live, and the same runs stopped in their second stage, each with a name.

    "0" has no rollouts of the stage yet. "4" has made its updates, with the newest checkpoint at update 4. "live" has
    its newest at update 2.
    """

    MOMENTS: ClassVar = {
        "0": r"open .*logs/001_rollout/attempt_0/rank_0000.log",
        "4": r"open .*stages/001/checkpoints/\.update_000006\..*\.tmp/.",
        "live": r"open .*stages/001/checkpoints/\.update_000004\..*\.tmp/.",
    }

    def __init__(self, folder: Path) -> None:
        self.folder, self.recipe = folder, write_laboratory(folder)
        self.prompts = (folder / "prompts.jsonl").read_bytes()

    def whole(self, live: bool) -> Path:
        run = self.folder / ("whole_live" if live else "whole")
        if not run.exists():
            train(self.recipe, run, *SETTINGS[live])
        return run

    def stopped(self, name: str) -> Path:
        run = self.folder / f"stopped_{name}"
        if not run.exists():
            kill_at(self.MOMENTS[name], 1, self.recipe, run, *SETTINGS[name == "live"])
        return run

    def attempt(self, trial: Trial) -> tuple[bool, str]:
        """(whether the outcome is as it must be, what happened)"""
        early = trial.call and any(part in trial.call[1] for part in (".arrow", "rollouts", "SEALED", "events"))
        run = self.folder / "run"
        shutil.rmtree(run, ignore_errors=True)
        (self.folder / "prompts.jsonl").write_bytes(self.prompts)
        shutil.copytree(self.stopped("live" if trial.live else "0" if early else "4"), run)
        counter = self.folder / "counter"
        counter.unlink(missing_ok=True)
        environment = dict(os.environ)
        if trial.call:
            call, part, number, n = trial.call
            environment["MEGARL_FAULT"] = f"{call}|{part}|{number}|{n}|{counter}"
        elif trial.damage:
            trial.damage(run)
        code, said = self.start(run, environment, trial.live)
        if trial.call and (not counter.exists() or counter.stat().st_size < trial.call[3]):
            return False, "the call was not made"
        if code == 0:
            return self.compare(run, "continued", trial.live)
        if not re.match(r"megarl: \S", said) or (code == 2 and "Traceback" in said) or code not in (1, 2):
            return False, f"exit {code}: {said}"
        first = said.splitlines()[0].replace(str(self.folder), "")
        if trial.damage:
            return code == 2, f"exit {code}: {first}"
        if trial.call[2] == errno.ENOSPC and (code != 2 or "no space left" not in first):
            return False, f"exit {code}: {first}"
        again, more = self.start(run, dict(os.environ), trial.live)
        if again:
            return False, f"exit {code}: {first}; then exit {again}: {more}"
        return self.compare(run, f"exit {code}: {first}; continued", trial.live)

    def start(self, run: Path, environment: dict[str, str], live: bool) -> tuple[int, str]:
        """(exit code, what megarl itself said)"""
        result = megarl("train", self.recipe, "--run-dir", run, *SETTINGS[live], env=environment)
        return result.returncode, result.stderr[max(0, result.stderr.find("megarl: ")) :].strip()

    def compare(self, run: Path, how: str, live: bool) -> tuple[bool, str]:
        (self.folder / "prompts.jsonl").write_bytes(self.prompts)  # for the undisturbed run, if it is yet to be made
        try:
            (assert_same_live_run if live else assert_same_run)(self.whole(live), run)
        except (AssertionError, OSError, ValueError) as error:
            return False, f"{how}, but SILENTLY DIFFERENT: {str(error).splitlines()[0] if str(error) else error!r}"
        return True, f"{how}, same bytes"


def main() -> None:
    pattern = re.compile(sys.argv[1] if len(sys.argv) > 1 else "")
    with tempfile.TemporaryDirectory(prefix="megarl-faults-") as folder:
        library = Path(folder) / "interposed.so"
        source = Path(__file__).with_name("interposed.c")
        subprocess.run(["cc", "-O1", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
        os.environ["LD_PRELOAD"] = str(library)  # for the process of which every `megarl` is a fork
        laboratory = Laboratory(Path(folder))
        wrong, chosen = 0, [trial for trial in trials() if pattern.search(trial.name)]
        for trial in chosen:
            good, outcome = laboratory.attempt(trial)
            wrong += not good
            print(f"{'ok   ' if good else 'WRONG'} {trial.name:70} {outcome[:300]}", flush=True)
    print(f"{len(chosen)} faults, {wrong} wrong")
    sys.exit(wrong > 0)


if __name__ == "__main__":
    main()
