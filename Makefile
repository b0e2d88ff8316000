# `make demo` and `make test` set themselves up: where no virtual environment is active they make .venv and install into it.

ifdef VIRTUAL_ENV
VENV := $(VIRTUAL_ENV)
else
VENV := .venv
endif
PYTHON ?= python3
BIN := $(VENV)/bin
STAMP := $(VENV)/.lightning-rlstab-installed

# One thread per process: with all cores busy, more threads make small matrix products many times slower.
export OMP_NUM_THREADS := 1
export MKL_NUM_THREADS := 1
export TOKENIZERS_PARALLELISM := false
export HF_HUB_OFFLINE := 1

.PHONY: demo test fast-test lint types docs build clean

demo: $(STAMP)  ## Watch a tiny policy learn addition; about a minute
	$(BIN)/python -m lightning_rlstab.demo

test: $(STAMP)  ## Every check and every test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/mypy
	$(BIN)/python -m pytest -n 2 --dist worksteal -q

fast-test: $(STAMP)  ## Tests that take under ten seconds each
	$(BIN)/python -m pytest -n 2 --dist worksteal -q -m "not slow"

lint: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(STAMP)  ## The reference of the public surface from its docstrings, as HTML in build/api
	$(BIN)/python -m pip install --quiet --upgrade-strategy only-if-needed -c constraints.txt -e ".[docs]"
	$(BIN)/python docs/_api.py

build: $(STAMP)
	$(BIN)/python -m build

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade-strategy only-if-needed -c constraints.txt -e ".[dev]"
	touch $(STAMP)

clean:
	rm -rf build dist runs .pytest_cache .mypy_cache .ruff_cache .hypothesis
