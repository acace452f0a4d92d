# `make quickstart` and `make test` are all there is to do: each makes .venv first if it is not there or out of date.

PYTHON ?= python3
RUN := .venv/bin/python
KERNELS := CMakeLists.txt $(shell find csrc -type f)
.PHONY: quickstart test test-layouts test-crashes test-rehearsal test-engines test-cluster test-megatron-next test-trackers test-triton faults kills gpu lint bench launch sglang

quickstart: .venv/.stamp
	$(RUN) examples/quickstart/run.py

test: .venv/.stamp  # all that needs neither vLLM, SGLang nor Slurm, on the CPU's path
	$(RUN) -m pytest -q -n 4 --dist worksteal --durations=15 --ignore=tests/slurm --ignore=tests/rehearsal \
	    --ignore=tests/gpu -m "not vllm and not sglang and not crash and not layouts"

test-layouts: .venv/.stamp
	$(RUN) -m pytest -q -n 2 --dist worksteal --durations=10 -m layouts tests/actor tests/distributed tests/phases

test-crashes: .venv/.stamp  # most of the time is waiting
	$(RUN) -m pytest -q -n 4 --dist worksteal --durations=10 -m crash

test-rehearsal: .venv/.stamp  # the GPU's path, on a CUDA device made of host memory
	$(RUN) -m tests.rehearsal.build  # cached
	$(RUN) -m pytest -q -n 2 --dist worksteal --durations=10 tests/rehearsal tests/gpu

test-engines: .venv/.stamp
	$(RUN) -m pytest -q --durations=10 -m "vllm or sglang"

test-cluster: .venv/.stamp
	$(RUN) -m pytest -q --durations=10 tests/slurm

faults: .venv/.stamp  # needs a C compiler
	$(RUN) -m tests.faults

kills: .venv/.stamp
	$(RUN) -m tests.faults.kills $(COUNT) $(SEED)

# the actor on Megatron-Core 0.19, in front of the tested 0.16; its wheels are built for Python 3.12, and its compiled
# part, a data loader's, is not used
test-megatron-next: .venv/.stamp
	$(RUN) -m pip install -q --upgrade --target build/megatron-next --no-deps --only-binary=:all: --python-version 3.12 \
	    --ignore-requires-python --platform manylinux_2_28_x86_64 megatron-core==0.19.2
	PYTHONPATH=build/megatron-next $(RUN) -m pytest -q tests/actor

# Weights & Biases and MLflow, in front of the tested packages and in their versions, but for a cachetools that MLflow
# refuses. The packages after mlflow-skinny are what its tracking server needs
TRACKERS := wandb==0.31.0 mlflow-skinny==3.17.2 sqlalchemy==2.1.9 alembic==1.20.1 \
    aiohttp flask==3.1.3 flask-cors==6.0.5 pandas==3.1.1
test-trackers: .venv/.stamp
	grep -v ^cachetools== constraints.txt > build/trackers.txt
	test -d build/trackers || $(RUN) -m pip install -q --target build/trackers -c build/trackers.txt $(TRACKERS)
	PYTHONPATH=build/trackers MEGARL_REQUIRE_TRACKERS=1 $(RUN) -m pytest -q tests/storage/test_trackers.py

# Triton's kernels for sm_90 and sm_100 by the version that torch 2.13 pins for GPUs; the tested one is newer. Its
# compiler needs no GPU
GPU_TRITON := 3.7.1
test-triton: .venv/.stamp
	test -d build/triton-$(GPU_TRITON) || $(RUN) -m pip install -q --target build/triton-$(GPU_TRITON) --no-deps triton==$(GPU_TRITON)
	PYTHONPATH=build/triton-$(GPU_TRITON) MEGARL_TRITON=$(GPU_TRITON) $(RUN) -m pytest -q -n 2 tests/kernels/test_triton_aot.py \
	    -k "not sm_80"

# checks and benchmarks on this machine's GPUs, with a .venv or without: STEPS="checks", "actor token_pass" ..
gpu:
	@$(or $(wildcard $(RUN)),$(PYTHON)) -W ignore -m tests.gpu $(STEPS)

lint: .venv/.stamp
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy

launch:  # the environment of launch/slurm.py
	$(PYTHON) tools/setup_venv.py launch

sglang:  # the environment of tests/sglang
	$(PYTHON) tools/setup_venv.py sglang

bench: .venv/.stamp
	for benchmark in $(filter-out benchmarks/common.py,$(wildcard benchmarks/*.py)); do $(RUN) $$benchmark || exit; done

.venv/.stamp: tools/setup_venv.py pyproject.toml constraints.txt $(KERNELS)
	$(PYTHON) tools/setup_venv.py
	touch $@
