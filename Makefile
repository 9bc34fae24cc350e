# make demo   environment, install, the comparison with SDPA on three masks, on a GPU if there is one
# make test   environment, install, ruff, mypy, pytest without the long tests: seven minutes on two cores
# make test-all  make test, then the long tests, make ends and make package
# make package   the source distribution and the wheel in dist, checked
# make fuzz   environment, install, random programs beside float64, ten minutes on each backend that runs here
# make docs   environment, install, the site in build/site; make docs-serve shows it
# make clean  remove the environment and the caches of the tools
#
# PYTHON is the Python to start from, VENV the environment that is made from it, FUZZ more arguments for fuzz.

PYTHON ?= python3
VENV ?= .venv
FUZZ ?=
RUN := $(VENV)/bin/python
# Python's bytecode is written: pytest rewrites 300 files otherwise, in each worker, and tests start processes.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-all long fuzz clean

demo: $(VENV)/ready
	@echo "[3/3] compare: flexmod beside torch's SDPA, results first, then times"
	@$(RUN) -m flexmod compare sliding_window document causal
	@echo "or:   $(VENV)/bin/flexmod show 'causal & sliding_window(1024)'"
	@echo "      docs/quickstart.md has the Python, examples/ nine programs; make test runs the tests"

test: $(VENV)/installed
	$(RUN) -m ruff check .
	$(RUN) -m mypy
	$(RUN) -m pytest -n 2 --dist worksteal -m "not long and not every and not alone"

test-all: test
	$(MAKE) long ends package

long: $(VENV)/installed
	$(RUN) -m pytest -n 2 --dist worksteal -m "long and not every"

# make ends: a sample of the tests with the newest Triton and the oldest small packages.
.PHONY: ends
ends: $(VENV)/installed
	tools/ends "$(VENV)"

# make package: twine and check-wheel-contents look at both, and the source distribution runs tests.
.PHONY: package
package: $(VENV)/installed
	tools/package "$(VENV)"

# make matrix compiles every mask and mod for every chip: hours of work, which goes on where it stopped.
# MATRIX: options, such as --seconds 3600 --processes 8
.PHONY: matrix
matrix: $(VENV)/installed
	nice -n 15 $(RUN) -m benchmarks.compile_matrix $(MATRIX)

fuzz: $(VENV)/installed
	PYTHONPATH=.:tests OMP_NUM_THREADS=1 $(RUN) -m fuzz $(FUZZ)

# make sanitize runs compute-sanitizer's memcheck and racecheck over calls of every kind of kernel, on a GPU.
.PHONY: sanitize
sanitize: $(VENV)/installed
	tools/sanitize $(RUN)

# make docs builds the site into build/site, offline and strict; make docs-serve shows it and follows changes.
.PHONY: docs docs-serve
docs: $(VENV)/docs
	NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs build

docs-serve: $(VENV)/docs
	NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs serve

$(VENV)/docs: $(VENV)/installed
	$(VENV)/bin/pip install --quiet --constraint "$(VENV)/constraints.txt" --config-settings editable_mode=compat --editable '.[docs]'
	touch $@

$(VENV)/ready: pyproject.toml tools/environment
	@PYTHON="$(PYTHON)" tools/environment "$(VENV)"
	@touch $@

$(VENV)/installed: $(VENV)/ready
	$(VENV)/bin/pip install --quiet --constraint "$(VENV)/constraints.txt" --config-settings editable_mode=compat --editable '.[test,dev]'
	touch $@

clean:
	rm -rf .venv build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
