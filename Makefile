# make demo   train a small GPT on real text and generate from it
# make test   run the test suite
#
# Each makes its own virtual environment first; a second run skips what is done.
# Variables to override: PYTHON (the interpreter to build on), VENV, PIP_ARGS, PYTEST_ARGS, TEST_WORKERS, DEMO_*.

PYTHON ?= python3
VENV ?= .venv
PIP_ARGS ?=
PYTEST_ARGS ?=
TEST_WORKERS ?= auto
# Folders with python3.10 and so on for test-versions, searched before PATH; and the rows to check.
PYTHON_DIRS ?=
ROWS ?=
GPU_MINUTES ?= 30
SECONDS ?= 60
SEED ?=
FILES ?=
SINCE ?=
COUNT ?= 100
BACKEND ?=
export PIP_ARGS PYTEST_ARGS TEST_WORKERS PYTHON_DIRS

DEMO_OUT ?= runs/demo
DEMO_TRAIN_ARGS ?= --tokenizer bpe --steps 1500
DEMO_PROMPT ?= def __init__(self
DEMO_GENERATE_ARGS ?= --tokens 300 --seed 0

bin := $(VENV)/bin
# Costly files first, as tests/conftest.py has them; else the slowest would begin last.
run_tests = $(bin)/pytest -n $(TEST_WORKERS) --dist loadfile --no-loadscope-reorder --benchmark-disable

# What else an extra of pyproject.toml installs.
contained_dev := test gpt
contained_test := gpt

# Two installs into one environment must not run at once.
.NOTPARALLEL:
.DELETE_ON_ERROR:
.PHONY: help demo test fuzz mutants test-nightly test-versions test-servers lint format links typecheck docs dist test-wheel gpu clean

help:
	@sed -n 's/^# \{0,1\}//p' Makefile | head -n 5
	@echo "make test-nightly   the suite with what the gate leaves out: more GPUs, head dims, dtypes, splits"
	@echo "make fuzz   random calls of every function against the oracle, for SECONDS"
	@echo "make mutants   COUNT lines of FILES, or of what changed SINCE, made wrong by rule: which does no test see?"
	@echo "make test-versions  check supported releases of torch, Triton, transformers and Python"
	@echo "make test-servers   the integrations of servers, on their own classes, from their distributions"
	@echo "make lint   ruff check, ruff format --check, mypy, and pyright on what users write"
	@echo "make format rewrite the sources with ruff"
	@echo "make docs   the site, in build/site; a broken link or a public name without a docstring fails"
	@echo "make dist   wheel and sdist, checked, in dist"
	@echo "make test-wheel     install into an environment of its own, and verify the kernels there"
	@echo "make gpu    on a GPU: verify, time and tune, in GPU_MINUTES; results in runs/gpu"
	@echo "make clean  remove the environment, the demo and all caches"

# --resume leaves a finished run as it is, and continues one that was interrupted.
demo: $(VENV)/.installed-gpt
	$(bin)/fastattn train --out "$(DEMO_OUT)" --resume $(DEMO_TRAIN_ARGS)
	$(bin)/fastattn generate --checkpoint "$(DEMO_OUT)" --prompt "$(DEMO_PROMPT)" $(DEMO_GENERATE_ARGS)
	@echo "checkpoint and loss curve: $(DEMO_OUT)"

test: $(VENV)/.installed-test
	$(run_tests) $(PYTEST_ARGS)

test-nightly: $(VENV)/.installed-test
	FASTATTN_NIGHTLY=1 $(run_tests) $(PYTEST_ARGS)

# Random legal calls against the oracle for SECONDS, or one SEED again; BACKEND: torch, triton, hopper.
fuzz: $(VENV)/.installed-test
	@bin=$$(cd "$(bin)" && pwd) && cd tests/helpers && PYTHONPATH=../tools:../../examples "$$bin/python" -m fuzz \
		--seconds "$(SECONDS)" $(if $(SEED),--seed "$(SEED)") $(if $(BACKEND),--backend "$(BACKEND)")

# The first time, the suite runs under coverage: which test runs which line.
mutants: $(VENV)/.installed-mutants
	@test -f build/mutants/map/junit.xml || $(bin)/python tests/mutants --map
	$(bin)/python tests/mutants --count "$(COUNT)" $(if $(SEED),--seed "$(SEED)") \
		$(if $(SINCE),--since "$(SINCE)") $(FILES)

# Each row of tests/versions.py has an environment of its own; ROWS picks some.
test-versions:
	@$(PYTHON) tests/versions.py $(ROWS)

# On the servers' own classes, on a CPU: distributions unpacked, and what else they import. The
# environment's own packages come first, whatever the servers pin.
VLLM ?= build/servers/vllm-0.33.0
SGLANG ?= build/servers/sglang-0.5.23
DIFFUSERS ?= build/servers/diffusers-0.42.1
XFORMERS ?= build/servers/xformers-0.0.35
imported := $(CURDIR)/build/servers/imported
test-servers: $(VENV)/.installed-test $(VLLM) $(SGLANG) $(DIFFUSERS) $(XFORMERS) build/servers/imported
	FASTATTN_VLLM="$(abspath $(VLLM)):$(imported)" $(bin)/pytest -W ignore --benchmark-disable -q \
		tests/compat/test_vllm.py
	FASTATTN_SGLANG="$(abspath $(SGLANG)):$(imported)" $(bin)/pytest -W ignore --benchmark-disable -q \
		tests/compat/test_sglang.py
	FASTATTN_DIFFUSERS="$(abspath $(DIFFUSERS))" $(bin)/pytest -W ignore --benchmark-disable -q \
		tests/compat/test_diffusers.py
	FASTATTN_XFORMERS="$(abspath $(XFORMERS))" $(bin)/pytest -W ignore --benchmark-disable -q \
		tests/compat/test_xformers.py

# vLLM's setup.py, which pip runs for its metadata, wants to know what to build: nothing.
build/servers/vllm-0.33.0:
	$(bin)/python -m pip install -q $(PIP_ARGS) --target build/servers/tools setuptools-rust
	VLLM_VERSION_OVERRIDE=0.33.0 VLLM_TARGET_DEVICE=empty PYTHONPATH="$(CURDIR)/build/servers/tools" \
		$(bin)/python -m pip download $(PIP_ARGS) -d build/servers vllm==0.33.0 \
		--no-deps --no-binary :all: --no-build-isolation
	tar -xzf $@.tar.gz -C build/servers

build/servers/sglang-0.5.23:
	$(bin)/python -m pip download $(PIP_ARGS) -d build/servers sglang==0.5.23 --no-deps
	$(bin)/python -m zipfile -e build/servers/sglang-0.5.23-*.whl $@

build/servers/diffusers-0.42.1:
	$(bin)/python -m pip download $(PIP_ARGS) -d build/servers diffusers==0.42.1 --no-deps
	$(bin)/python -m zipfile -e build/servers/diffusers-0.42.1-*.whl $@

build/servers/xformers-0.0.35:
	$(bin)/python -m pip download $(PIP_ARGS) -d build/servers xformers==0.0.35 --no-deps
	$(bin)/python -m zipfile -e build/servers/xformers-0.0.35-*.whl $@

build/servers/imported:
	$(bin)/python -m pip install -q $(PIP_ARGS) --target $@ pyzmq cbor2 openai openai-harmony msgspec \
		cachetools cloudpickle
	$(bin)/python -m pip install -q $(PIP_ARGS) --no-deps --target $@ apache-tvm-ffi \
		compressed-tensors dill gguf ipython loguru orjson partial-json-parser pybase64 sentencepiece \
		starlette traitlets

lint: $(VENV)/.installed-dev
	$(bin)/ruff check .
	$(bin)/ruff format --check .
	@$(MAKE) --no-print-directory typecheck

format: $(VENV)/.installed-dev
	$(bin)/ruff check --fix .
	$(bin)/ruff format .

# Neither mypy nor the reference's reader can follow the import hook of an editable install, so they
# would not find fastattn.kernels. They get a folder of links in the shape of the installed package.
links:
	@rm -rf build/links && mkdir -p build/links/fastattn
	@ln -s "$(CURDIR)"/fastattn/* "$(CURDIR)/kernels" build/links/fastattn/
	@ln -s "$(CURDIR)/bench/harness" build/links/fastattn/bench

# The program of a user has lines that both have to refuse: a `type: ignore` of no use is an error.
typecheck: $(VENV)/.installed-dev links
	@bin=$$(cd "$(bin)" && pwd) && cd build/links && "$$bin/mypy" \
		--config-file ../../pyproject.toml --cache-dir ../../.mypy_cache \
		fastattn ../../tests/typing ../../tests/tools
	@bin=$$(cd "$(bin)" && pwd) && cd build/links && "$$bin/lint-imports" ../../pyproject.toml --no-cache --no-logo
	@$(bin)/basedpyright --pythonpath $(bin)/python -p tests/typing

docs: $(VENV)/.installed-docs links
	NO_MKDOCS_2_WARNING=1 $(bin)/mkdocs build --strict

# The version is that of the newest tag.
dist: $(VENV)/.installed-dev
	@rm -rf dist build/bdist.*
	$(bin)/python -c 'import sys, setuptools.build_meta as x; x.build_sdist("dist"); x.build_wheel("dist")'
	$(bin)/twine check --strict dist/*

test-wheel:
	@rm -rf build/wheel build/bdist.*
	$(PYTHON) -m venv build/wheel
	build/wheel/bin/python -m pip install $(PIP_ARGS) .
	cd build/wheel && bin/fastattn verify --quick

gpu: $(VENV)/.installed-test
	@mkdir -p runs/gpu
	$(bin)/python bench/run_all.py --out runs/gpu --budget-minutes $(GPU_MINUTES)

$(VENV)/.created:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
		{ echo "fastattn needs Python 3.10 or later: make PYTHON=/path/to/python3" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' || \
		{ echo "$(PYTHON) lacks the venv module (Debian, Ubuntu: apt install python3-venv)" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.installed-%: pyproject.toml constraints.txt | $(VENV)/.created
	$(bin)/python -m pip install $(PIP_ARGS) -c constraints.txt -e ".[$*]"
	@touch $@ $(addprefix $(VENV)/.installed-,$(contained_$*))

clean:
	rm -rf $(VENV) $(DEMO_OUT) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache \
		.hypothesis .benchmarks
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
