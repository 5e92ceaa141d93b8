# SPDX-License-Identifier: Apache-2.0
# `make help` lists what there is. Everything lives in .venv and build/; PYTHON=python3.12 picks another interpreter.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
STAMPS := $(VENV)/.stamps
export PATH := $(CURDIR)/$(VENV)/bin:$(PATH)
export PIP_DISABLE_PIP_VERSION_CHECK := 1
unexport PYTHONPATH

PYTEST_WORKERS ?= 2
PINNED := build demo test lint
# Both, or the one that `make demo DEMO_ARGS="--only torch"` asks for.
FRAMEWORKS := $(or $(shell sed -n 's/.*--only[ =]*\(tensorflow\|torch\)\b.*/\1/p' <<< '$(DEMO_ARGS)'),tensorflow torch)
# Warnings are errors with the g++ that CI has. What another one warns of must not stop somebody's `make demo`.
WERROR := $(if $(filter 12,$(shell $(CXX) -dumpversion)),--werror)
INSTALL = $(RUN) -m pip install --quiet -c requirements/constraints.txt

.PHONY: help env build wheel test test-all installs check sanitize format demo bench clean distclean

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' Makefile

env: $(FRAMEWORKS:%=$(STAMPS)/%)  ## make .venv: pinned requirements, and Horovod built for them (5 minutes once)

$(STAMPS)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "$(PYTHON) is not there, or older than 3.11. Install Python, or name one: make PYTHON=..."; exit 1; }
	$(PYTHON) -m venv $(VENV) \
	  || { rm -rf $(VENV); echo "No virtual environment. On Debian: sudo apt-get install python3-venv"; exit 1; }
	@mkdir -p $(STAMPS)
	@touch $@

$(STAMPS)/requirements: $(STAMPS)/python $(PINNED:%=requirements/%.txt) requirements/constraints.txt
	@echo "Installing the pinned requirements: tools, then the frameworks, a few minutes."
	$(INSTALL) $(PINNED:%=-r requirements/%.txt)
	@touch $@

$(STAMPS)/torch: $(STAMPS)/requirements requirements/torch.txt
	$(INSTALL) -r requirements/torch.txt
	@touch $@

$(STAMPS)/tensorflow: $(STAMPS)/requirements requirements/tensorflow.txt requirements/no-deps.txt \
  tools/install_horovod.py
	$(INSTALL) -r requirements/tensorflow.txt
	$(INSTALL) --no-deps -r requirements/no-deps.txt
	$(RUN) tools/install_horovod.py --reuse --wheel-dir build/wheels
	@touch $@

build: $(STAMPS)/package  ## compile the core and the ops, and put the package into .venv
	@$(RUN) tools/build.py $(WERROR)

# Once; the libraries are built in place, so that `make build` and edits of Python files need no new installation.
$(STAMPS)/package: $(FRAMEWORKS:%=$(STAMPS)/%) pyproject.toml setup.py
	$(RUN) tools/build.py $(WERROR)
	$(RUN) -m pip install --quiet --no-build-isolation --no-deps --editable .
	@touch $@

wheel: build  ## a wheel in dist/ for the frameworks of .venv
	$(RUN) -m pip wheel --quiet --no-build-isolation --no-deps --wheel-dir dist .

# Files go to processes in the order of their names: suites that start ranks, and take long, are among the first.
PYTEST = $(RUN) -m pytest -n $(PYTEST_WORKERS) --dist loadfile --no-loadscope-reorder

test: build  ## run the tests in 2 processes (PYTEST_ARGS="-k name" picks some, PYTEST_WORKERS=8 takes 8)
	$(PYTEST) -m "not slow" $(PYTEST_ARGS)

test-all: build  ## those that take long too: more ranks, the examples, wheels
	$(PYTEST) $(PYTEST_ARGS)

installs: build  ## install into empty environments, on each Python of README's table (downloads; an hour)
	$(RUN) -m pytest -m installs $(PYTEST_ARGS)

check: build  ## formatting, lint, clang-tidy, types, headers, include rules, exported symbols
	$(RUN) tools/check.py

sanitize: build  ## the tests of the core under GCC's sanitizers: addresses, undefined behaviour, races
	$(RUN) tools/sanitize.py

format: $(STAMPS)/requirements  ## rewrite the sources as `make check` wants them
	$(RUN) tools/check.py --fix

demo: build  ## train the same DLRM in TensorFlow and in PyTorch on 2 processes (DEMO_ARGS="--data DIR" for your data)
	$(RUN) -m examples.dlrm.run_demo $(DEMO_ARGS)

bench: build $(STAMPS)/bench  ## measure against other libraries; results in benchmarks/results
	$(RUN) -m benchmarks $(BENCH_ARGS)

$(STAMPS)/bench: $(STAMPS)/requirements requirements/bench.txt
	$(RUN) -m pip install --quiet --no-deps -r requirements/bench.txt
	@touch $@

clean:  ## remove what was compiled, keep .venv and the Horovod wheel
	rm -rf build/core build/tensorflow build/torch build/debug build/sanitize build/mypy
	rm -rf build/lib build/bdist.* dist *.egg-info
	rm -f core/python/sparse_operation_kit/lib/*.so tf_frontend/libsok_* torch_frontend/libsok_*
	rm -f $(STAMPS)/package

distclean: clean  ## remove .venv and build/ too
	rm -rf $(VENV) build
