# Lockstep: everything runs in .venv, which is made from python3 (3.11 or newer) on first use and again when what is
# pinned changes. A second call finds the stamp files and starts at once.

SHELL := /bin/bash
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo $$p; break; }; done)
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
PINS := pyproject.toml constraints.txt
# Everything but torch is compared with hashes/ before it is installed; HASHES=no leaves that out, for an index that builds
# files of its own.
HASHES ?= yes
HASHED = $(if $(filter-out no,$(HASHES)),$(or $(2),$(BIN))/python -m pip install --quiet --disable-pip-version-check --no-deps \
	--require-hashes -r hashes/$(1).txt || { echo "The packages of hashes/$(1).txt were not installed (see above). If your index \
	builds packages itself: make HASHES=no" >&2; exit 1; })
JOB ?= digits
ARGS ?=
BENCHMARKS := step/run.py launch/run.py order/run.py strategies/run.py strategies/price_of_k.py strategies/price_of_shards.py \
	pipeline/bubble.py reducers/run.py parameter_server/run.py saves/run.py start/run.py loading/run.py heartbeat/run.py
PHOTOS ?=

.PHONY: train test test-all course course-pages notebooks docs chaos gpu ports portable audit check house files format bench bench-photos curves figures clean

train: $(VENV)/.train
	$(BIN)/lockstep train $(JOB) $(ARGS)

# Compiled once: the tests start hundreds of processes, and where PYTHONDONTWRITEBYTECODE is set, as in many images, each
# would compile all that it imports.
COMPILED = @$(BIN)/python -m compileall -q src tests

test: $(VENV)/.test
	$(COMPILED)
	$(BIN)/python -m pytest -n 4 --dist loadfile --no-loadscope-reorder $(ARGS)

test-all: $(VENV)/.test
	$(COMPILED)
	$(BIN)/python -m pytest -n 2 --dist loadfile --slow -m "not crowd" $(ARGS)
	$(BIN)/python -m pytest --slow -m crowd

# Runs all code of docs/course and compares what it prints with the pages; course-pages writes the pages again.
course: $(VENV)/.test
	$(BIN)/python -m pytest --slow tests/course $(ARGS)

course-pages: $(VENV)/.test
	$(BIN)/python -m tests.course.pages --run $(ARGS)

# The chapters as Jupyter notebooks, beside their pages.
notebooks: $(VENV)/.test
	$(BIN)/python -m tests.course.notebooks

# The site, in build/site/index.html, which needs no server and no network; every link is checked.
docs: .docs/.stamp
	PYTHONPATH=src NO_MKDOCS_2_WARNING=1 .docs/bin/mkdocs build --strict --quiet $(ARGS)
	@echo "build/site/index.html"

# Random runs under random faults, judged by docs/faults.md: make chaos SECONDS=600 SEED=1
SECONDS ?= 600
SEED ?= 0
chaos: $(VENV)/.test
	$(BIN)/python -m tests.soak.chaos $(SECONDS) $(SEED)

# Ports of public scripts, cloned below one folder: make ports SCRIPTS=DIR ARGS="--only mnist"; see examples/ports/README.md
SCRIPTS ?=
ports: $(VENV)/.test
	$(BIN)/python examples/ports/run.py "$(SCRIPTS)" $(ARGS)

# The proof kit for GPUs (docs/gpu.md), on the torch of PYTHON: make gpu PYTHON=python3 ARGS="--parts ab"; SIMULATED=1 runs it on
# simulated devices, with the torch of .venv.
gpu: $(if $(SIMULATED),$(VENV)/.test)
	@[ -n "$(SIMULATED)$(PYTHON)" ] || { echo "Lockstep needs Python 3.11 or newer as python3, or PYTHON=/path/to/it." >&2; exit 2; }
	PYTHONPATH=src:.$${PYTHONPATH:+:$$PYTHONPATH} $(if $(SIMULATED),$(BIN)/python,$(PYTHON)) -m tests.gpu.kit $(if $(SIMULATED),--simulated) $(ARGS)

check: $(VENV)/.check
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(MAKE) --no-print-directory audit

# Known vulnerabilities of what is pinned; a sentence where there is no network.
audit: $(VENV)/.check
	-@$(BIN)/python -c "import pip_audit" 2>/dev/null || \
		$(BIN)/python -m pip install --quiet --retries 1 --disable-pip-version-check pip-audit
	$(BIN)/python tests/pins.py

# Counts what tests/test_house.py holds: files, lines, small files, class names twice, ...; ARGS=-v names the places.
house: $(VENV)/.train
	$(BIN)/python tests/house.py $(ARGS)

# Writes docs/files.md, one sentence about each source file, out of their docstrings.
files: $(VENV)/.train
	$(BIN)/python tests/house.py --files

format: $(VENV)/.check
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench:
	benchmarks/setup.sh
	for b in $(BENCHMARKS); do .venv-bench/bin/python benchmarks/$$b || exit 1; done
	[ -z "$(PHOTOS)" ] || $(MAKE) bench-photos

# Needs photos, one folder for each class, and torchvision, which comes with the tests: make bench PHOTOS=flower_photos
bench-photos: $(VENV)/.test
	for b in images notes; do $(BIN)/python benchmarks/$$b/run.py --data "$(PHOTOS)" || exit 1; done

# The three curves of the notes on photos, in about seven minutes of one core: make curves PHOTOS=flower_photos
RUNS ?= runs/curves
CURVE = $(BIN)/lockstep train benchmarks/notes/curves.toml --data "$(PHOTOS)" --set run.directory="$(RUNS)" --set run.name
curves: $(VENV)/.train
	$(CURVE)=one --devices cpu:1 --set training.micro_batches=1
	$(CURVE)=batchnorm --devices cpu:2
	$(CURVE)=sync --devices cpu:2 --set training.sync_batch_norm=true
	$(BIN)/lockstep compare $(addprefix $(RUNS)/,one batchnorm sync) --svg "$(RUNS)/curves.svg" \
		--labels "one device,BatchNorm on 16,SyncBatchNorm on 16"

# Compares this CPU with three that qemu emulates (Debian: qemu-user), in about ten minutes, and writes docs/portable.md.
portable: $(VENV)/.train
	$(BIN)/python tests/portable/run.py --write $(ARGS)

figures: $(VENV)/.train
	$(BIN)/python tests/explain/figures.py docs/figures

clean:
	rm -rf $(VENV) .docs build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis src/*.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@[ -n "$(PYTHON)" ] || { echo "Lockstep needs Python 3.11 or newer as python3, or PYTHON=/path/to/it." >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.train: $(PINS) hashes/train.txt | $(BIN)/python
	$(call HASHED,train)
	$(PIP) -e '.[tensorboard]'
	@touch $@

$(VENV)/.test: $(VENV)/.train hashes/test.txt
	$(call HASHED,test)
	$(PIP) -e '.[test]' pyyaml
	$(PIP) --no-deps torchvision timm huggingface_hub
	@touch $@

$(VENV)/.check: $(VENV)/.train hashes/check.txt
	$(call HASHED,check)
	$(PIP) -e '.[check]'
	@touch $@

.docs/.stamp: constraints.txt hashes/docs.txt
	@[ -n "$(PYTHON)" ] || { echo "Lockstep needs Python 3.11 or newer as python3, or PYTHON=/path/to/it." >&2; exit 2; }
	$(PYTHON) -m venv .docs
	$(call HASHED,docs,.docs/bin)
	.docs/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt mkdocs-material 'mkdocstrings[python]' \
		jieba ruff numpy psutil filelock tqdm
	@touch $@
