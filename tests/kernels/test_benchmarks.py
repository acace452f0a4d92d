"""Benchmarks: backends that fail or are wrong, the operations that a method is credited with, timing on a GPU."""

from __future__ import annotations

from types import ModuleType, SimpleNamespace

import pytest
import torch

from tests.kernels.benchmark import load_benchmark

CPU = torch.device("cpu")


@pytest.fixture
def token_pass(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The benchmark, with eager torch in place of torch.compile, which takes seconds."""
    benchmark = load_benchmark("token_pass")
    monkeypatch.setattr(benchmark, "compiled", lambda name, statistics: benchmark.everything(name, "torch", statistics))
    return benchmark


def test_a_backend_that_fails_is_named_and_the_others_are_measured(token_pass: ModuleType) -> None:
    for row in (
        token_pass.measure("grpo", 512, CPU, ["cpp", "cuda"], 1),
        load_benchmark("selection").measure("m2po", 512, CPU, ["cpp", "cuda"], 1, False),
    ):
        assert row["cuda ms"] == "failed" and row["failed"].startswith("cuda: "), row
        assert row["cpp ms"] > 0 and row["torch ms"] > 0
        assert any(name.endswith("/cpp") for name in row) and not any(name.endswith("/cuda") for name in row)


def test_a_backend_that_is_wrong_is_not_measured(token_pass: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    right = token_pass.everything

    def wrong(name: str, backend: str, statistics: object) -> object:
        run = right(name, "torch", statistics)
        return (lambda batch: 1.001 * run(batch)) if backend == "cpp" else run

    monkeypatch.setattr(token_pass, "everything", wrong)
    row = token_pass.measure("grpo", 512, CPU, ["cpp"], 1)
    assert row["cpp ms"] == "failed" and "cpp: AssertionError" in row["failed"]


def test_a_head_is_credited_with_its_own_products() -> None:
    """Four matrix products; three with materialised logits, because the forward pass keeps them."""
    operations = load_benchmark("linear_logprob").operations
    shape = {"tokens": 3, "width": 5, "vocabulary": 7}
    assert operations("materialised", **shape) == (210, 630)
    assert operations("megarl triton", **shape) == (210, 840)


def test_gpu_time_is_measured_between_events_after_flushing_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fake CUDA runtime records the order of the calls. The measured runs take 7, 5 and 6, so the median is 6."""
    common, tape, durations = load_benchmark("common"), [], iter([0, 0, 0, 7, 5, 6])

    class Event:
        clock = 0

        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            tape.append("event")
            self.at = Event.clock

        def elapsed_time(self, end: Event) -> int:
            assert tape[-1] == "wait"
            return end.at - self.at

    class Flush:
        def zero_(self) -> None:
            tape.append("flush")
            Event.clock += 100

    def empty(size: int, **_: object) -> Flush:
        assert size > 64
        return Flush()

    def run() -> None:
        tape.append("run")
        Event.clock += next(durations)

    cache = SimpleNamespace(L2_cache_size=64)
    cuda = SimpleNamespace(Event=Event, get_device_properties=lambda: cache, synchronize=lambda: tape.append("wait"))
    monkeypatch.setattr(common, "torch", SimpleNamespace(cuda=cuda, empty=empty, int8=torch.int8))
    assert common.gpu_milliseconds(run, repeats=3) == 6
    assert tape == ["run"] * 3 + ["flush", "event", "run", "event"] * 3 + ["wait"]
