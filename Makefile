# Two commands on a fresh machine (Python >= 3.10 with venv): `make demo` and `make test`.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --quiet --disable-pip-version-check

.PHONY: help demo setup check test test-fast bench bench-swaps clean

help:
	@echo "make demo       embed real sentences with all-MiniLM-L6-v2 on the emulated NPU"
	@echo "make test       lint, types and every test, as CI runs them"
	@echo "make test-fast  the tests that are not marked slow"
	@echo "make check      lint and types"
	@echo "make bench      throughput on a corpus of installed packages' documentation"
	@echo "make bench-swaps  swaps, switches and runs a text by slots, policy and pack size"

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml | $(BIN)/python
	@echo "installing into $(VENV) ..."
	$(PIP) install -e .
	@touch $@

$(VENV)/.installed-dev: pyproject.toml | $(BIN)/python
	@echo "installing into $(VENV) ..."
	$(PIP) install -e '.[dev]'
	@touch $@ $(VENV)/.installed

$(VENV)/.installed-bench: $(VENV)/.installed
	$(PIP) install -e '.[bench]'
	@touch $@

setup: $(VENV)/.installed-dev

demo: $(VENV)/.installed
	$(BIN)/npu-embed embed --table --stats \
	  "two cats sleeping on a sofa" \
	  "A pair of kittens asleep on the couch." \
	  "a red car parked outside" \
	  "How do I reset my password?" \
	  "Open Settings, choose Security, then Reset."

check: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: check
	$(BIN)/python -m pytest

test-fast: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -m "not slow"

bench: $(VENV)/.installed-bench
	$(BIN)/python benchmarks/throughput.py

bench-swaps: $(VENV)/.installed-bench
	@mkdir -p benchmarks/results
	$(BIN)/python benchmarks/swaps.py --plot benchmarks/results/swaps.png > benchmarks/results/swaps.jsonl

clean:
	rm -rf $(VENV) build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
