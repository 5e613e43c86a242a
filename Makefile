# `make install` makes .venv, as all others do first; deploy/install.py says what it fetches meanwhile. `make demo` trains a
# small model from nothing. `make test` checks offmate in ten minutes, `make test-all` with all tests; `make test-later` runs
# those that `make test` leaves to `make test-all`. `make docs` builds the documentation into site/.

PYTHON ?= $(firstword $(foreach name,python3 python3.14 python3.13 python3.12 python3.11,$(shell \
	$(name) -c 'import sys; sys.version_info >= (3, 11) and print("$(name)")' 2>/dev/null)))
BIN := .venv/bin
INSTALLED := .venv/.installed
# Where this is set, each of pytest's workers compiles all test files anew, which takes eight seconds.
unexport PYTHONDONTWRITEBYTECODE
# A file's tests share what they make: models, traces, daemons.
PARALLEL := -n 3 --dist loadfile --no-loadscope-reorder

.PHONY: install demo docs lint test test-later test-all

install: $(INSTALLED)

demo: $(INSTALLED)
	PATH="$(CURDIR)/$(BIN):$$PATH" sh examples/demo.sh

docs: $(INSTALLED)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "Open site/index.html in a browser."

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint
	$(BIN)/python -m pytest $(PARALLEL) -m "not later"

test-later: $(INSTALLED)
	$(BIN)/python -m pytest $(PARALLEL) -m later

test-all: lint
	$(BIN)/python -m pytest $(PARALLEL)

$(INSTALLED): pyproject.toml constraints.txt deploy/install.py
	@if [ -z "$(PYTHON)" ]; then echo "Python 3.11 or newer is needed.  hint: sudo apt install python3"; exit 2; fi
	$(PYTHON) deploy/install.py .venv
	@touch $@
