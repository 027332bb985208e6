# make demo      train the embedded default on this machine       (own .venv)
# make demo-llava  a tiny LLaVA on drawn shapes: whole, then adapters for new shapes   (1 minute)
# make demo-qlora  the same with a base of 4 bits beside the adapters   (1 minute)
# make demo-vlm  a tiny Qwen3-VL: the same losses in four ways, in full, then adapters on fp32 and on 4 bits   (4 minutes)
# make demo-grpo  a tiny model learns to sort from rewards: two training ranks, and a sampler that gets their weights   (2 minutes)
# make test      what CI runs: lint, types, tests                  (5 minutes on 2 quiet cores)
# make test ROOM=plan   the tests of one package of src/zero3d     (4 minutes)
# make test-part PART=COMMIT   the part of the longer tests that a commit's hash chooses (CI: its own)   (2 minutes)
# make test CPU=noise  the tests as on another CPU: avx2 and default have kernels without AVX-512 or AVX2, noise draws the last
#                bit of each matrix product (tests/cpus.py); of test-all, too. Of test-part: the part of all cases that CI runs so
# make test-all  all tests, the longer ones too                    (more than an hour on 2 quiet cores)
# make test-peers   those beside TRL, Lightning, DeepSpeed and Axolotl, which it installs
# make costs     what each test file takes, into tests/durations.json and CONTRIBUTING.md; costs-all: the longer ones, too
# make sizes     lines of code of src and of its core, into CONTRIBUTING.md
# make drawing   who imports whom, into docs/imports.md
# make mutants   planted faults: which tests see them, into tests/mutants   (12 minutes)
# make campaign  what benchmarks/gpu_check.py does on a GPU, with gloo and the CPU in its place   (at most 10 minutes)
# make bench     engines side by side on 2 CPU ranks
# make versions  the tests with other versions of Python, torch and transformers, one row of docs/tested.md each; ROW=NAME: one
# make tables    the tables of README and docs anew, from benchmarks/results
# make docs      the site of README and docs, in .build/docs
#
# PIP_OPTIONS passes options to pip, for example an index with CPU wheels of torch.
# JOBS=4 runs that many test files at the same time; without it one more than there are cores.
# TORCH=2.11.0 takes another torch than constraints.txt pins, in a .venv of its own; make test runs the campaign on it, too.
# TRANSFORMERS=5.16.0 takes another transformers, likewise, with the huggingface_hub that it asks for.
PYTHON ?= python3
PIP_OPTIONS ?=
TORCH ?=
TRANSFORMERS ?=
PART ?= $(shell git rev-parse HEAD)
VENV := .venv$(TORCH:%=-torch-%)$(TRANSFORMERS:%=-transformers-%)
OTHERS := $(TORCH:%=-e 's/^torch==.*/torch==%/') \
  $(TRANSFORMERS:%=-e 's/^transformers==.*/transformers==%/' -e '/^huggingface_hub==/d')
CONSTRAINTS := $(if $(TORCH)$(TRANSFORMERS),$(VENV)/constraints.txt,constraints.txt)
BIN := $(VENV)/bin
JOBS ?= $(shell expr $$(nproc 2>/dev/null || getconf _NPROCESSORS_ONLN) + 1)
ROOM ?=
ROW ?=
INTO ?=
CPU ?=
# Where the CPU multiplies bf16 matrices without its vectors, ten times as slowly as fp32 ones, the demo is in fp32.
SLOW_BF16 := $(shell grep -qsE 'avx512|bf16' /proc/cpuinfo || echo --precision fp32)
# Files are compiled once for all processes, whatever the caller's environment says.
PYTHON_TESTS := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(CPU:%=ZERO3D_TEST_CPU=%) $(BIN)/python
PYTEST := $(PYTHON_TESTS) -m pytest --numprocesses=$(JOBS)
AXOLOTL := 0.21.0
PEERS := $(patsubst %,tests/parity/test_%.py,axolotl deepspeed_itself lightning lightning_programs trl trl_vision) tests/unit/test_routes.py
CAMPAIGN = $(BIN)/python benchmarks/gpu_check.py --device cpu --json $(VENV)/campaign.json

.PHONY: demo demo-llava demo-qlora demo-vlm demo-grpo test test-part test-all test-peers costs costs-all sizes drawing mutants campaign lint bench versions tables docs clean

demo: $(VENV)/.installed
	$(BIN)/zero3d train $(SLOW_BF16)

demo-llava: $(VENV)/.installed
	$(BIN)/python examples/llava_demo/demo.py

demo-qlora: $(VENV)/.installed
	$(BIN)/python examples/llava_demo/demo.py zero3d-demo-qlora model.quantize=nf4

demo-vlm: $(VENV)/.installed
	$(BIN)/python examples/vlm_demo/demo.py

demo-grpo: $(VENV)/.installed
	$(BIN)/python examples/grpo_demo/demo.py

test: $(VENV)/.installed-dev
	$(PYTEST) --room=$(ROOM)
	$(if $(TORCH),$(CAMPAIGN))

test-part: $(VENV)/.installed-dev
	$(PYTEST) --part=$(PART)

test-all: $(VENV)/.installed-dev
	$(PYTEST) -m "long or not long"

test-peers: $(VENV)/.installed-peers
	$(PYTEST) -m "long or not long" $(PEERS)

costs: $(VENV)/.installed-dev
	$(PYTHON_TESTS) tests/costs.py "not long"

costs-all: $(VENV)/.installed-dev
	$(PYTHON_TESTS) tests/costs.py "long or not long"

sizes: $(VENV)/.installed-dev
	$(PYTHON_TESTS) tests/costs.py sizes

drawing: $(VENV)/.installed-dev
	$(PYTHON_TESTS) tests/map/drawing.py

mutants: $(VENV)/.installed-dev
	$(PYTHON_TESTS) tests/mutants/run.py

campaign: $(VENV)/.installed
	$(CAMPAIGN)

lint: $(VENV)/.installed-dev
	$(PYTEST) tests/map/test_lint.py
	$(BIN)/python tests/map/sizes.py

bench: $(VENV)/.installed
	$(BIN)/python benchmarks/engines.py

versions:
	$(PYTHON) benchmarks/versions.py --python '$(PYTHON)' --row '$(ROW)' --into '$(INTO)'

tables: $(VENV)/.installed
	$(BIN)/python benchmarks/tables.py --write
	$(BIN)/python docs/site/reference.py --write

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
	@$(if $(TORCH)$(TRANSFORMERS),sed $(OTHERS) constraints.txt > $(CONSTRAINTS))
	$(BIN)/python -m pip install --quiet $(PIP_OPTIONS) -c $(CONSTRAINTS) -e '.[hf,vlm,plot,data]'
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet $(PIP_OPTIONS) -c $(CONSTRAINTS) -e '.[hf,vlm,plot,data,dev]'
	@touch $@

# Axolotl's package pins an older transformers and asks for Python 3.12, which its plugins' interface does not need;
# DeepSpeed builds against the torch that is there.
$(VENV)/.installed-peers: $(VENV)/.installed-dev
	$(BIN)/python -m pip install --quiet $(PIP_OPTIONS) -c $(CONSTRAINTS) -e '.[hf,vlm,plot,data,dev,trl,lightning]' setuptools wheel ninja
	$(BIN)/python -m pip install --quiet $(PIP_OPTIONS) --no-deps --ignore-requires-python axolotl==$(AXOLOTL) addict
	$(BIN)/python -m pip install --quiet $(PIP_OPTIONS) -c $(CONSTRAINTS) --no-build-isolation deepspeed
	@touch $@

$(VENV)/.installed-docs: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet $(PIP_OPTIONS) -c $(CONSTRAINTS) -e '.[hf,vlm,plot,data,docs]'
	@touch $@

clean:
	rm -rf .venv .venv-torch-* .venv-transformers-* .build/docs zero3d-demo*
