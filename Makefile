# Every target sets up what it needs in .venv. A card is found through nvidia-smi; without one the
# NumPy path runs, and the kernels are compiled and emulated.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
CUDA := $(shell nvidia-smi 2>/dev/null | sed -n 's/.*CUDA Version: \([0-9]*\).*/\1/p')
CARD := $(if $(CUDA),cuda$(if $(filter 12,$(CUDA)),12,13),)
RUNS := runs
# The oldest and the newest cards and Hopper: lint compiles for these, compile for all.
GENERATIONS := 80 90a 120a

.PHONY: quickstart test slow lint compile gpu bench clean

quickstart: $(VENV)/.base
	rm -rf $(RUNS)/shakespeare
	$(BIN)/surogate-run examples/shakespeare/quickstart.toml --set output_dir=$(RUNS)/shakespeare
	$(BIN)/python examples/shakespeare/curve.py $(RUNS)/shakespeare/log.jsonl
	$(BIN)/surogate generate $(RUNS)/shakespeare --raw --prompt "ROMEO." --max-new-tokens 120 --seed 1

# Without a card the tests share the cores, one process and one BLAS thread each.
test: $(VENV)/.test
	$(if $(CARD),,OPENBLAS_NUM_THREADS=1) $(BIN)/python -m pytest -q -m "not slow" $(if $(CARD),,-n auto)

# What learns for hundreds of steps, kills runs at random moments, or runs whole benchmark suites.
slow: $(VENV)/.test
	$(if $(CARD),,OPENBLAS_NUM_THREADS=1) $(BIN)/python -m pytest -q -m slow $(if $(CARD),,-n auto)

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m surogate.kernels.nvrtc $(GENERATIONS)

# Compiles every kernel for every architecture; needs no card.
compile: $(VENV)/.test
	$(BIN)/python -m surogate.kernels.nvrtc

gpu: $(VENV)/.test
	$(BIN)/python -m pytest -q -m gpu

# Measures every op, matrix product and step on a card: BENCH = "bench/test_ops.py -k rmsnorm" for
# some. Writes bench/RESULTS.md.
BENCH ?= bench
bench: $(VENV)/.test
	mkdir -p $(RUNS)
	$(BIN)/python -m pytest $(BENCH) -q -m gpu --benchmark-quiet --benchmark-json $(RUNS)/bench.json
	$(BIN)/python -m bench.report $(RUNS)/bench.json

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --upgrade pip

$(VENV)/.base: pyproject.toml $(VENV)/bin/python
	$(BIN)/python -m pip install -q -e '.$(if $(CARD),[$(CARD)],)'
	touch $@

$(VENV)/.test: pyproject.toml $(VENV)/bin/python
	$(BIN)/python -m pip install -q -e '.[test,lint,$(if $(CARD),$(CARD),compile)]'
	touch $@ $(VENV)/.base

clean:
	rm -rf $(VENV) $(RUNS) build dist *.egg-info
