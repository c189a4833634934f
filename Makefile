PYTHON ?= python3
JOBS ?= logical # processes that tests run in
TORCH ?= # a version other than the pinned one: it gets an environment of its own
VENV := .venv$(TORCH:%=-%)
BIN := $(VENV)/bin
CONSTRAINTS := $(if $(TORCH),$(VENV)/constraints.txt,constraints.txt)
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint $(CONSTRAINTS)

# Tests start some hundred Pythons: each of them would compile all that it imports.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo site test thorough check ruff dist triton bench gpu clean

help: ## show this list
	@grep -E '^[a-z]+:.*## ' Makefile | sed 's/:.*## /	/' | expand -t 10

FAULT ?= # of the demo: learning_rate, softmax_twice, no_zero_grad, layers_in_a_list or nan

demo: $(VENV)/installed-examples ## record examples/train_digits.py unmodified and write the report; FAULT=nan: a sick one
	@if [ -f runs/demo/manifest.json ]; then rm -r runs/demo; fi
	$(BIN)/retrograd run -o runs/demo --inventory 1 examples/$(if $(FAULT),sick_$(FAULT:sick_%=%),train_digits).py
	$(BIN)/retrograd explain runs/demo
	$(BIN)/retrograd report runs/demo
	@echo "Open $(CURDIR)/runs/demo/report.html in a browser. To see a run in it while it trains:"
	@echo "$(BIN)/retrograd run --open examples/train_digits.py"

site: $(VENV)/installed-docs ## build the documentation into site/, where it opens as files; a dead link is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet --strict
	@echo "Open $(CURDIR)/site/index.html in a browser."

# mypy takes a minute of one core: it runs beside the tests, and what it finds stands behind them.
test: $(if $(TORCH),$(VENV)/installed-test,ruff) ## run all checks and tests; TORCH=2.15.0: the tests with that version
	@$(if $(TORCH),,$(BIN)/mypy >$(VENV)/mypy.log & types=$$!;) \
	$(BIN)/pytest --numprocesses $(JOBS) --maxprocesses 4 --max-worker-restart 0 \
		--dist loadfile --no-loadscope-reorder $(THOROUGH) || failed=1; \
	$(if $(TORCH),,wait $$types || failed=1; cat $(VENV)/mypy.log;) exit $${failed:-0}

thorough: THOROUGH := --thorough
thorough: test ## the same with every sweep in full, which takes several times as long

check: ruff
	$(BIN)/mypy

ruff: $(VENV)/installed-dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check

# The wheel is built of the archive, in a folder of its own: what was built here before is not in it.
dist: $(VENV)/installed-dev ## build wheel and source archive in dist/, and try both where nothing else is installed
	rm -rf dist
	$(BIN)/python -m build --no-isolation
	$(PYTHON) tests/distributions.py dist/*
	if command -v actionlint >/dev/null; then actionlint; fi

triton: $(VENV)/triton ## install Triton beside torch, 1 GB: without a GPU, the CUDA kernel is tested in its interpreter

$(VENV)/triton: $(VENV)/installed-dev
	$(INSTALL) --no-deps --target $@ triton==3.9.0

bench: $(VENV)/installed-dev ## measure what it costs
	$(BIN)/python benchmarks/recording.py
	$(BIN)/python benchmarks/budget.py
	$(BIN)/python benchmarks/memory.py
	$(BIN)/python benchmarks/starting.py
	$(BIN)/python benchmarks/tracing.py
	$(BIN)/python benchmarks/rewriting.py
	$(BIN)/python benchmarks/features.py
	$(BIN)/python benchmarks/inventory.py
	$(BIN)/python benchmarks/saved_tensors.py

# Uninstalled, so that it runs where nothing can be fetched: with .venv if there is one, else with $(PYTHON).
gpu: ## all that has to be seen on a CUDA device, in nine minutes; ARGS="--only waits": some of it; small without one
	$(or $(wildcard $(BIN)/python),$(PYTHON)) benchmarks/gpu.py --out $(or $(OUT),runs/gpu) $(ARGS)

clean: ## remove the environments, what was built and the caches; recorded runs stay
	rm -rf .venv .venv-* build dist site src/*.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find src -name '*.so' -delete
	find src tests benchmarks examples -name __pycache__ -prune -exec rm -r {} +

# Without build isolation, so that the build's own tools are pinned too. Other versions of torch ask for other setuptools.
$(VENV)/installed-%: pyproject.toml constraints.txt $(wildcard setup.py src/retrograd/*/*.c)
	[ -x $(BIN)/pip ] || $(PYTHON) -m venv $(VENV)
	$(if $(TORCH),(grep -vE '^(torch|setuptools)==' constraints.txt; echo 'torch==$(TORCH)') >$(CONSTRAINTS))
	$(INSTALL) setuptools wheel
	$(INSTALL) --no-build-isolation --editable '.[$*]'
	@touch $@
