# make demo      train the embedded default on this machine       (own .venv)
# make demo-llava  a tiny LLaVA on drawn shapes: whole, then adapters for new shapes   (3 minutes)
# make test      what CI runs: lint, types, tests                  (6 minutes on 2 quiet cores)
# make test-part PART=COMMIT   the part of the longer tests that a commit's hash chooses (CI: its own)   (3 minutes)
# make test-all  all tests, the longer ones too, beside TRL, Lightning, DeepSpeed, Axolotl   (2 hours)
# make campaign  what benchmarks/gpu_check.py does on a GPU, with gloo and the CPU in its place   (3 minutes)
# make bench     engines side by side on 2 CPU ranks
# make tables    the tables of README and docs anew, from benchmarks/results
# make docs      the site of README and docs, in .build/docs
#
# PIP_OPTIONS passes options to pip, for example an index with CPU wheels of torch.
# TORCH=2.11.0 takes another torch than constraints.txt pins, in a .venv of its own; make test runs the campaign on it, too.
PYTHON ?= python3
PIP_OPTIONS ?=
TORCH ?=
PART ?= $(shell git rev-parse HEAD)
VENV := .venv$(TORCH:%=-torch-%)
CONSTRAINTS := $(if $(TORCH),$(VENV)/constraints.txt,constraints.txt)
BIN := $(VENV)/bin
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest
CAMPAIGN = $(BIN)/python benchmarks/gpu_check.py --device cpu --json $(VENV)/campaign.json

# Ranks wait for one another: two halves of equal length fill what that leaves of two cores; the second is told last.
PARITY := $(wildcard tests/parity/test_[a-r]*.py tests/parity/test_sa*.py)
BESIDE := tests/map tests/unit tests/ranks $(wildcard tests/parity/test_s[b-z]*.py tests/parity/test_[t-z]*.py)
LONG_BESIDE := $(wildcard tests/parity/test_pipeline_*.py tests/parity/test_plan*.py tests/parity/test_re*.py)
define both
@{ $(BIN)/mypy && $(PYTEST) $(1) $(3); } > $(VENV)/beside.log 2>&1 & beside=$$!; \
  trap "kill $$beside; exit 130" INT TERM; \
  $(PYTEST) $(1) $(2); parity=$$?; \
  wait $$beside; beside=$$?; cat $(VENV)/beside.log; exit $$((parity | beside))
endef

.PHONY: demo demo-llava test test-part test-all campaign style lint bench tables docs clean

demo: $(VENV)/.installed
	$(BIN)/zero3d train

demo-llava: $(VENV)/.installed
	$(BIN)/python examples/llava_demo/demo.py

test: style
	$(call both,,$(PARITY),$(BESIDE))
	$(if $(TORCH),$(CAMPAIGN))

test-part: $(VENV)/.installed-dev
	$(PYTEST) --part=$(PART)

test-all: style $(VENV)/.installed-peers
	$(call both,-m "long or not long",$(filter-out $(LONG_BESIDE),$(PARITY)),$(BESIDE) $(LONG_BESIDE))

style: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

campaign: $(VENV)/.installed
	$(CAMPAIGN)

lint: style
	$(BIN)/mypy

bench: $(VENV)/.installed
	$(BIN)/python benchmarks/engines.py

tables: $(VENV)/.installed
	$(BIN)/python benchmarks/tables.py --write

docs: $(VENV)/.installed-docs
	$(BIN)/python -m sphinx --fail-on-warning --keep-going --quiet -c docs/site docs .build/docs
	@echo "the first page: .build/docs/index.html"

$(VENV)/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "zero3d needs Python 3.11 or newer, and $(PYTHON) is $$($(PYTHON) --version): pass PYTHON=python3.11"; exit 2; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || \
	  { v=$$($(PYTHON) -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])'); \
	    echo "$(PYTHON) cannot make virtual environments: install the Debian package $$v (sudo apt-get install $$v)"; exit 2; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(if $(TORCH),sed 's/^torch==.*/torch==$(TORCH)/' constraints.txt > $(CONSTRAINTS))
	$(BIN)/python -m pip install --quiet $(PIP_OPTIONS) -c $(CONSTRAINTS) -e '.[hf,vlm,plot,data]'
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet $(PIP_OPTIONS) -c $(CONSTRAINTS) -e '.[hf,vlm,plot,data,dev]'
	@touch $@

# Axolotl's package pins an older transformers, and DeepSpeed builds against the torch that is there.
$(VENV)/.installed-peers: $(VENV)/.installed-dev
	$(BIN)/python -m pip install --quiet $(PIP_OPTIONS) -c $(CONSTRAINTS) -e '.[hf,vlm,plot,data,dev,trl,lightning]' setuptools wheel ninja
	$(BIN)/python -m pip install --quiet $(PIP_OPTIONS) --no-deps axolotl addict
	$(BIN)/python -m pip install --quiet $(PIP_OPTIONS) -c $(CONSTRAINTS) --no-build-isolation deepspeed
	@touch $@

$(VENV)/.installed-docs: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet $(PIP_OPTIONS) -c $(CONSTRAINTS) -e '.[hf,vlm,plot,data,docs]'
	@touch $@

clean:
	rm -rf .venv .venv-torch-* .build/docs zero3d-demo*
