PYTHON ?= python3
BIN := .venv/bin

export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PIP_ROOT_USER_ACTION := ignore

.DEFAULT_GOAL := help
.PHONY: help demo test unit coverage lint types test-browser verify stress soak bench docs package clean

help:  ## List the targets.
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' Makefile | expand -t 14

demo: .venv/.installed  ## Run the demonstration.
	$(BIN)/python examples/demo.py

test: lint types unit  ## Run every check but those in a browser: style, imports, types, tests.

# One thread a worker: the two pytest workers then share two cores without fighting for them.
unit: .venv/.installed
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest

test-browser: .venv/.browser .venv/.installed  ## Open reports in Chromium, which is installed where it is missing.
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m browser -n 2 --dist=loadfile tests/browser

coverage: .venv/.installed  ## Run the tests and say which lines and branches they miss; fails below 95%.
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --cov --cov-report=term-missing:skip-covered

lint: .venv/.installed  ## Check style, formatting and the layers of imports.
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/lint-imports --no-logo

types: .venv/.installed  ## Check the types of the library.
	$(BIN)/mypy

verify: .venv/.installed  ## Run the full-size checks; they write results/verify/*.json.
	$(BIN)/python -m pytest -m verify -n 0 -v

stress: .venv/.installed  ## Random problems, files and interruptions, in full; OPTEQ_STRESS=0.1 for a tenth of them.
	OPTEQ_STRESS=$${OPTEQ_STRESS:-1} OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m stress tests/stress

soak: .venv/.installed  ## Train for 30 minutes with a checkpoint every 5 s: memory and open files must stay as they are.
	OMP_NUM_THREADS=1 $(BIN)/python tests/stress/soak.py --minutes 30

bench: .venv/.bench  ## Compare with other libraries, interleaved; BENCH="--quick" takes two minutes.
	$(BIN)/python benchmarks/run.py $(BENCH)

docs: .venv/.docs  ## Build the documentation into site/.
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

# In a folder of its own, so that what is imported is what was installed.
package: .venv/.package  ## Build the wheel and the sdist into dist/, check them, and try the wheel in an environment of its own.
	rm -rf dist
	$(BIN)/python -m build --no-isolation --outdir dist
	$(BIN)/python -m twine check --strict dist/*
	@$(PYTHON) -m venv dist/try
	dist/try/bin/python -m pip install -qq --no-compile -c constraints.txt dist/*.whl
	@sed -n '/^```python/,/^```$$/{/^```$$/q;/^```/d;p}' README.md > dist/try/readme.py
	cd dist/try && bin/python readme.py | grep CONVERGED
	cd dist/try && bin/opteq --version && bin/python -m opteq info
	@rm -rf dist/try

clean:  ## Remove .venv and everything that was built.
	rm -rf .venv site dist .coverage .coverage.* .hypothesis .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
	find src tests examples benchmarks -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true

.venv/.installed: pyproject.toml constraints.txt
	@echo "installing opteq and its tools into .venv"
	@$(PYTHON) -m venv .venv
	@$(BIN)/python -m pip install -qq --no-compile -c constraints.txt -e '.[dev]'
	@touch $@

.venv/.browser: tests/browser/setup.sh
	@tests/browser/setup.sh .venv/axe
	@touch $@

.venv/.docs .venv/.bench .venv/.package: .venv/.%: .venv/.installed
	@$(BIN)/python -m pip install -qq --no-compile -c constraints.txt -e '.[$*]'
	@touch $@
