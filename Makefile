# Two commands do everything: `make report` tests the claims with few replicates and writes the page, `make test` runs the
# tests. Each makes its environment first. `make report-full` uses all replicates.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# pins every direct dependency, also inside pip's build environments; without it torch may bring GBs of CUDA packages
export PIP_CONSTRAINT := $(CURDIR)/constraints.txt
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: help report report-full test test-slow bench lint format wheel-check clean

help:
	@echo "make report | report-full | test | test-slow | bench | lint | format | wheel-check | clean"

report: $(VENV)/.with-report,models
	$(BIN)/helmscope report --quick

report-full: $(VENV)/.with-report,models
	$(BIN)/helmscope report --full

test: $(VENV)/.with-test
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --durations=10

test-slow: $(VENV)/.with-slow
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -m slow

# on the GPU where there is one, else on one core at a smaller scale
bench: $(VENV)/.with-test
	for name in figure3 right_hand_side growth accuracy recording threads circle_transport density; do \
		OMP_NUM_THREADS=1 $(BIN)/python benchmarks/$$name.py || exit 1; done
	$(BIN)/python benchmarks/results.py

lint: $(VENV)/.with-test
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

format: $(VENV)/.with-test
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

# the wheel as a user gets it: built, installed into an empty environment, used from outside the tree
wheel-check: $(VENV)/.with-test
	bash .ci/wheel-check $(BIN)/python

clean:
	rm -rf $(VENV) dist build

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "$(PYTHON) is older than Python 3.11: say make PYTHON=python3.11 ..."; exit 1; }
	$(PYTHON) -m venv $(VENV)

# .with-report,models .with-test .with-slow: the package in place with those extras
$(VENV)/.with-%: pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/pip install --quiet --editable '.[$*]'
	touch $@
