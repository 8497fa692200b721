PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
export FEDQ_DATA ?= $(abspath $(wildcard ../shared/data))
# empty: each process that tests start would compile the library anew, and pytest all tests
export PYTHONDONTWRITEBYTECODE =

OLDEST ?= .venv-oldest
# CONSTRAINTS=/dev/null takes the newest packages; ALSO=lightning installs that one, too; TORCH='torch --index-url ADDRESS'
# installs that build of torch first (pytorch.org has the address of the one for CPUs, 0.7 GB in place of 5)
CONSTRAINTS ?= constraints.txt
ALSO ?=
TORCH ?=
# uv takes a third of pip's time; pip knows indices of its own configuration, where uv finds none
INSTALL = sh -c '$(BIN)/uv pip install --quiet --python $(BIN)/python "$$@" || \
	$(BIN)/python -m pip install --quiet --no-compile "$$@"' install --constraint $(CONSTRAINTS)

# a test that hangs ends its worker, and the others go on; files in conftest.py's order, the longest first
WORKERS = -n 2 --dist loadfile --no-loadscope-reorder -o faulthandler_exit_on_timeout=true

.PHONY: coverage deploy-demo demo release test test-all test-flower test-slow test-oldest check docs tables tutorials gpu setup clean clean-compiled
setup: $(VENV)/.ready

# what the library itself needs
$(VENV)/.core: pyproject.toml constraints.txt
	@echo "first time: installing into $(VENV), up to 6 GB, of which torch and CUDA are 5, minutes without a word"
	$(PYTHON) -m venv $(VENV)
	-$(BIN)/python -m pip install --quiet --constraint $(CONSTRAINTS) uv
	$(if $(TORCH),$(INSTALL) $(TORCH))
	$(INSTALL) --editable .
# Python compiles what a training imports now; with PYTHONDONTWRITEBYTECODE=1 each start would do it again
	$(BIN)/python -c "import lightning_fedq.callbacks, matplotlib.pyplot"
	touch $@

# and all that tests, docs and checks need
$(VENV)/.ready: $(VENV)/.core
	@echo "installing what tests, docs and checks need: 1 GB more, minutes without a word"
	$(INSTALL) --editable '.[dev,flower,mlflow]' $(ALSO)
	touch $@

# one thread: with two, a model as small as this one takes 4 times as long
demo: $(VENV)/.core
	OMP_NUM_THREADS=1 $(BIN)/fedq fit --config configs/digits_private.yaml

# without what takes half a second and more
test: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(WORKERS) -q -m "not slow and not site and not long"

# tests on a device that is not the CPU have processes of their own
test-all: setup
	OMP_NUM_THREADS=1 FEDQ_ELSEWHERE=1 $(BIN)/python -m pytest $(WORKERS) -q tests/*/test_elsewhere.py
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(WORKERS)

# CI runs them once a week
test-slow: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m slow

# the lower bounds of pyproject.toml; other packages warn there of what newer ones have cured
test-oldest: $(OLDEST)/.ready
	OMP_NUM_THREADS=1 $(OLDEST)/bin/python -m pytest -n 2 --dist loadfile -o filterwarnings=default \
		tests/callbacks tests/commands tests/data tests/dpsgd tests/isolation tests/leakage \
		tests/audit/commands tests/training \
		tests/test_cli.py tests/test_configs.py tests/test_lightning_binding.py tests/test_train_example.py

$(OLDEST)/.ready: pyproject.toml constraints-oldest.txt
	@echo "installing the oldest supported packages into $(OLDEST): gigabytes, minutes"
	$(PYTHON) -m venv $(OLDEST)
	$(OLDEST)/bin/python -m pip install --quiet --constraint constraints-oldest.txt --editable '.[dev]'
	touch $@

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q tests/test_layers.py

# warnings are errors; nothing is fetched; the tutorials run, and their notebooks are what they give
docs: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q tests/test_docs.py -m site
	@echo "build/site/index.html; with its search: $(BIN)/python -m http.server --directory build/site"

# the tables of README and docs that repeat code
tables: setup
	OMP_NUM_THREADS=1 $(BIN)/python docs/generate.py

# run the tutorials, and write their pages and notebooks
tutorials: setup
	OMP_NUM_THREADS=1 MPLBACKEND=agg $(BIN)/python docs/tutorial.py

# all of a release but the upload: versions, wheel and sdist, and a try in empty environments of these interpreters
PYTHONS ?= python3.10 python3.13
release: setup
	$(BIN)/python -m pip install --quiet 'twine>=6.1'
	$(BIN)/python tests/release.py $(PYTHONS)

# lines that the fast tests run, as a table; child processes are not counted
coverage: setup
	$(BIN)/python -m pip install --quiet 'coverage>=7.6'
	OMP_NUM_THREADS=1 $(BIN)/python -m coverage run --source lightning_fedq -m pytest -q
	$(BIN)/python -m coverage report --skip-covered --sort cover

# what is skipped or slow without a GPU; it says "no GPU" and stops where there is none
gpu: setup
	$(BIN)/python benchmarks/gpu.py

# one SuperLink, four SuperNodes, TLS, and the models of the simulation
deploy-demo: setup
	OMP_NUM_THREADS=1 $(BIN)/python examples/deploy.py

# killed processes and real ones among them; the fast part of it runs in `make test`
test-flower: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/flower -m "slow or not slow"

# Numba does not see that compiled code calls a function of another file that has changed
clean-compiled:
	find lightning_fedq -name '*.nb[ci]' -delete

clean: clean-compiled
	rm -rf $(VENV) $(OLDEST) build *.egg-info .pytest_cache .mypy_cache .ruff_cache
