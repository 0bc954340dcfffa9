# make demo   set up, then show what the library does
# make test   set up, then check everything
#
# Set-up is a virtual environment in .venv. It is made once, and again when what it is made from
# changes. PYTHON chooses the interpreter: make test PYTHON=python3.12
# A test that lacks something here, a C compiler for one, is skipped and says so. Where all is there
# that must be an error: make test PYTEST_OPTIONS=--no-skips

PYTHON ?= python3
# Ranks wait for each other most of the time, so two files of tests are under way at once.
WORKERS := --numprocesses 2 --dist loadfile
VENV := .venv
RUN := $(VENV)/bin/python
READY := $(VENV)/.ready
MADE_FROM := pyproject.toml constraints.txt transport/_atomics.c transport/_atomics_core.h

.DEFAULT_GOAL := help
.PHONY: help setup demo test clean

help:
	@sed -n 's/^# //p' Makefile

setup: $(READY)

demo: $(READY)
	@$(RUN) -m gemmlink demo

test: $(READY)
	$(RUN) -m ruff check
	$(RUN) -m ruff format --check
	$(RUN) -m mypy
	$(RUN) -m pytest $(WORKERS) $(PYTEST_OPTIONS)

$(READY): $(MADE_FROM)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
	    echo "gemmlink needs Python 3.10 or newer: $(PYTHON) is missing or older." >&2; \
	    echo "Choose another one: make $(or $(MAKECMDGOALS),setup) PYTHON=python3.12" >&2; exit 1; }
	@echo "Setting up $(VENV) (once; torch is large) ..."
	@test -x $(RUN) || $(PYTHON) -m venv $(VENV)
	@rm -rf build
	@$(RUN) -m pip install --quiet --disable-pip-version-check \
	    --constraint constraints.txt --editable '.[dev]'
	@touch $@

clean:
	rm -rf $(VENV) build dist gemmlink.egg-info transport/_atomics*.so
	rm -rf .mypy_cache .pytest_cache .ruff_cache .hypothesis
