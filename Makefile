# make demo   a real model trained on real text, about five minutes on two CPU cores (uses the GPU if there is one)
# make test   everything CI checks: style, types, import contract, tests
# make test-all   the same with the slow tests: long matrices, the README's commands, the notebook
# make release   builds wheel and sdist into dist/, checks them in clean environments, dates the changelog's version
# make gpu    the tests that need a GPU, and the first benchmarks (benchmarks/Makefile has all); no network needed
#
# Each makes its own .venv. Arguments:
#   TORCH=…    what pip installs as torch, with any options, e.g. TORCH="torch==2.13.0 --index-url URL" for the URL that
#              torch's own install page gives for a CPU-only or another CUDA build (default: the index's own build)
#   VENV=      (empty) use PYTHON as it is and install nothing: for a GPU machine that has torch already
#   PYTHON=…   the interpreter to use (3.11 to 3.14)
#   SHARED=…   folder with the tests' data and models       SMOLLM2=…   SmolLM2-135M-Instruct as a folder (make gpu)

PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
SHARED ?= ../shared
SMOLLM2 ?= .cache/SmolLM2-135M-Instruct
RECIPE ?= demo/demo-cpu.yaml

ifeq ($(VENV),)
PY := PYTHONPATH=src:$(PYTHONPATH) $(PYTHON)
BENCH_PYTHON := $(if $(findstring /,$(PYTHON)),$(abspath $(PYTHON)),$(PYTHON))
READY :=
else
PY := $(VENV)/bin/python
BENCH_PYTHON := $(abspath $(VENV)/bin/python)
READY := $(VENV)/.ready
endif

.PHONY: demo test test-all check gpu release clean

demo: $(READY)
	$(PY) demo/prepare.py
	$(PY) -m pronghorn train $(RECIPE) $(SET)

# A worker that dies ends the run, and its test is named: with loadfile, xdist would wait forever for one started anew.
PYTEST := $(PY) -m pytest -rs -n 2 --dist loadfile --no-loadscope-reorder --max-worker-restart=0 --shared=$(SHARED)

test: check
	$(PYTEST)

test-all: check
	$(PYTEST) -m "not gpu"

check: $(READY)
	$(PY) -m ruff format --check .
	$(PY) -m ruff check .
	$(PY) -m mypy
	$(PY) -c "from importlinter.cli import lint_imports_command as lint; lint()" --no-cache

release: check
	$(PY) release.py

gpu: $(READY)
	$(PY) -m pytest -m gpu --shared=$(SHARED)
	$(MAKE) -C benchmarks ops ablations-llama-3.2-1b packed-vs-padded-smollm2 PYTHON="$(BENCH_PYTHON)" \
	  SHARED="$(abspath $(SHARED))" SMOLLM2="$(abspath $(SMOLLM2))"

$(VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install -q -c constraints.txt --upgrade pip
	$(PY) -m pip install -q -c constraints.txt $(TORCH)
	$(PY) -m pip install -q -c constraints.txt --build-constraint constraints.txt -e '.[gguf,nf4,dev]'
	touch $@

clean:
	rm -rf .venv .cache runs
