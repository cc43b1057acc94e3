# `make check` is what CI runs; each step also works alone.
PYTHON ?= python

.PHONY: check format lint types test

check: lint types test

format:
	$(PYTHON) -m ruff format .
	$(PYTHON) -m ruff check --fix .

lint:
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m ruff check .

types:
	$(PYTHON) -m mypy

test:
	$(PYTHON) -m pytest -m "not gpu"
