# `make quickstart` and `make test` are all there is to do: each makes .venv first if it is not there or out of date.

PYTHON ?= python3
RUN := .venv/bin/python
KERNELS := CMakeLists.txt $(shell find csrc -type f)

.PHONY: quickstart test lint bench launch

quickstart: .venv/.stamp
	$(RUN) examples/quickstart/run.py

test: .venv/.stamp
	$(RUN) -m pytest -x -q --durations=10

lint: .venv/.stamp
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy

launch:  # the environment of launch/slurm.py
	$(PYTHON) tools/setup_venv.py launch

bench: .venv/.stamp
	for benchmark in $(filter-out benchmarks/common.py,$(wildcard benchmarks/*.py)); do $(RUN) $$benchmark || exit; done

.venv/.stamp: tools/setup_venv.py pyproject.toml constraints.txt $(KERNELS)
	$(PYTHON) tools/setup_venv.py
	touch $@
