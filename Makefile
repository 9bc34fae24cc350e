# make demo   environment, install, the comparison with SDPA on three masks
# make test   environment, install, ruff, mypy, pytest
# make clean  remove the environment and the caches of the tools
#
# PYTHON is the Python to start from, VENV the environment that is made from it.

PYTHON ?= python3
VENV ?= .venv
RUN := $(VENV)/bin/python

.PHONY: demo test clean

demo: $(VENV)/installed
	$(RUN) -m flexmod compare causal sliding_window document

test: $(VENV)/installed
	$(RUN) -m ruff check .
	$(RUN) -m mypy
	$(RUN) -m pytest

# make ends: a sample of the tests with the newest Triton and the oldest small packages.
.PHONY: ends
ends: $(VENV)/installed
	tools/ends "$(VENV)"

# make matrix compiles every mask and mod for every chip: hours of work, which goes on where it stopped.
# MATRIX: options, such as --seconds 3600 --processes 8
.PHONY: matrix
matrix: $(VENV)/installed
	nice -n 15 $(RUN) -m benchmarks.compile_matrix $(MATRIX)

$(VENV)/installed: pyproject.toml tools/environment
	PYTHON="$(PYTHON)" tools/environment "$(VENV)"
	touch $@

clean:
	rm -rf .venv build .mypy_cache .ruff_cache .pytest_cache .hypothesis
