# `make quickstart` and `make test` are all there is to do: each makes .venv first if it is not there or out of date.

PYTHON ?= python3
RUN := .venv/bin/python
KERNELS := CMakeLists.txt $(shell find csrc megarl/objectives -type f -not -name "*.pyc")
.PHONY: quickstart smollm2 check test gate test-slow lint gpu launch wheel

quickstart: .venv/.stamp
	$(RUN) examples/quickstart/run.py

# a real language model; TASK=instructions or paragraphs: another recipe of examples/smollm2
smollm2: .venv/.stamp
	$(RUN) -W ignore examples/smollm2/make_base.py
	$(RUN) examples/smollm2/tasks.py
	OMP_NUM_THREADS=2 $(RUN) -m megarl.cli train examples/smollm2/$(or $(TASK),sums).toml \
	    --run-dir runs/smollm2-$(or $(TASK),sums)

check: .venv/.stamp  # the tests beside a change and those that import it, for five minutes at most
	$(RUN) -m tests.check $(if $(BASE),--base $(BASE))

test: .venv/.stamp  # all that needs neither vLLM, SGLang nor Slurm, on the CPU's path
	$(RUN) -m tests.suites test

gate: .venv/.stamp  # what a change has to pass; BASE=REV: with the suites of what has changed since
	$(RUN) -m tests.suites --gate $(if $(BASE),--base $(BASE))

test-slow: .venv/.stamp  # in full; WHAT="layouts crashes": these suites of tests/suites.py instead of all
	MEGARL_EVERY=1 $(RUN) -m tests.suites $(WHAT)

lint: .venv/.stamp
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy

# checks and benchmarks on this machine's GPUs, with a .venv or without: STEPS=first, STEPS=numbers, STEPS="actor token_pass" ..
gpu:
	@$(or $(wildcard $(RUN)),$(PYTHON)) -W ignore -m tests.gpu $(STEPS)

launch:  # the environment of launch/slurm.py
	$(PYTHON) tools/setup_venv.py launch

wheel: .venv/.stamp  # a wheel for many Linux distributions and the sources, in dist/; with CUDA kernels if there is nvcc
	$(RUN) tools/make_wheel.py

.venv/.stamp: tools/setup_venv.py pyproject.toml constraints.txt $(KERNELS)
	$(PYTHON) tools/setup_venv.py
	touch $@
