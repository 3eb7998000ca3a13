# Two commands on a fresh machine (Python >= 3.10 with venv): `make demo` and `make test`.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --quiet --disable-pip-version-check

.PHONY: help demo setup check test test-fast soak bench bench-compare bench-dispatch bench-scale bench-swaps fuzz clean

help:
	@echo "make demo       embed real sentences with all-MiniLM-L6-v2 on the emulated NPU"
	@echo "make test       lint, types and every test, as CI runs them"
	@echo "make test-fast  the tests that are not marked slow"
	@echo "make soak       minutes of mixed work and faults in two processes: memory stays flat"
	@echo "make check      lint and types"
	@echo "make bench      throughput on a corpus of installed packages' documentation"
	@echo "make bench-compare  beside sentence-transformers and onnxruntime, which it installs"
	@echo "make bench-dispatch  what a kernel run costs beside its arithmetic"
	@echo "make bench-scale  throughput and memory by pack size, text length, corpus size, threads"
	@echo "make bench-swaps  swaps, switches and runs a text by slots, policy and pack size"
	@echo "make fuzz       every parser and the emulated array fuzzed, FUZZ_SECONDS (600) each"

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

# What is slow as a whole is not even imported. Workers without a bytecode cache would parse and
# rewrite every test again.
FAST_TESTS := -m "not slow" --ignore=tests/integrations --ignore=tests/test_serve.py
PYTEST := PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest
PARALLEL := -n auto --dist worksteal

test: check
	$(PYTEST) $(FAST_TESTS) $(PARALLEL)
	$(PYTEST) -m "slow and not alone" $(PARALLEL)
	$(PYTEST) -m alone

test-fast: $(VENV)/.installed-dev
	$(PYTEST) $(FAST_TESTS) $(PARALLEL)

SOAK_SECONDS ?= 300

soak: $(VENV)/.installed-dev
	NPU_SOAK_SECONDS=$(SOAK_SECONDS) $(BIN)/python -m pytest tests/test_soak.py

bench: $(VENV)/.installed-bench
	$(BIN)/python benchmarks/throughput.py

bench-compare: $(VENV)/.installed-bench
	@mkdir -p benchmarks/results
	$(BIN)/python benchmarks/compare.py --plot benchmarks/results/compare.png > benchmarks/results/compare.jsonl

bench-dispatch: $(VENV)/.installed
	$(BIN)/python benchmarks/dispatch.py

bench-scale: $(VENV)/.installed-bench
	@mkdir -p benchmarks/results
	$(BIN)/python benchmarks/scale.py --plot benchmarks/results/scale.png > benchmarks/results/scale.jsonl

bench-swaps: $(VENV)/.installed-bench
	@mkdir -p benchmarks/results
	$(BIN)/python benchmarks/swaps.py --plot benchmarks/results/swaps.png > benchmarks/results/swaps.jsonl

# A finding ends it; its input is then in fuzz-findings. FUZZ_SECONDS is for each of the targets.
FUZZ_SECONDS ?= 600
FUZZ_TARGETS ?= manifest tensors_txt safetensors xclbin txn runs tokenizer ranges bundle embed checkpoint
FUZZ_BIN := .venv-fuzz/bin

.venv-fuzz/.installed: pyproject.toml
	$(PYTHON) -m venv .venv-fuzz
	$(FUZZ_BIN)/python -m pip --quiet --disable-pip-version-check install -e '.[fast]'
	-$(FUZZ_BIN)/python -m pip --quiet --disable-pip-version-check install --only-binary :all: atheris
	@touch $@

fuzz: .venv-fuzz/.installed
	@for target in $(FUZZ_TARGETS); do \
	  PYTHONPATH=tests $(FUZZ_BIN)/python -m fuzz.run $$target --seconds $(FUZZ_SECONDS) || exit 1; \
	done

clean:
	rm -rf .venv-fuzz $(VENV) build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
