"""The phases of a run; to add one, write its module and add one line to `PHASES`.

Modules are not imported here, because those of some phases import Megatron, which takes seconds.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Phase:
    """What megarl knows about a phase beside its code.

    module: has a function with the name of the phase, which takes the `Stage` and runs in each process of the phase.
    actor: it needs Megatron, which is then imported once on each node instead of once in each process.
    engine: it has rollout engines.
    updates: it makes updates of the run.
    saves: it saves its work when it is told to stop; a stop signal ends other phases at once.
    title: for a phase that is not part of a stage, what people read instead of the stage and the phase's name.
    """

    module: str
    actor: bool = False
    engine: bool = False
    updates: bool = False
    saves: bool = True
    title: str = ""


PHASES = {
    "rehearse": Phase("megarl.phases.rehearse", actor=True, title="rehearsal of an update"),
    "rollout": Phase("megarl.phases.rollout", engine=True),
    "optimize": Phase("megarl.phases.optimize", actor=True, updates=True),
    "live": Phase("megarl.phases.live.trainer", actor=True, engine=True, updates=True),
    "evaluate": Phase("megarl.phases.evaluate", engine=True, saves=False),
    "what_if": Phase("megarl.phases.what_if", actor=True, saves=False),
    "export": Phase("megarl.phases.export", actor=True, saves=False),
    "serve": Phase("megarl.phases.serve.phase", engine=True),
    "rescore": Phase("megarl.phases.rescore"),
}
