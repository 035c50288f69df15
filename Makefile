# Two commands do all set-up on a machine with Python 3.11+ and g++: `make serve` and `make test`.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
ARGS   ?=
# A test that hangs where no signal reaches it ends its worker; pytest then names the test.
PARALLEL := -n auto --dist worksteal -o faulthandler_timeout=660 -o faulthandler_exit_on_timeout=true
FAST   := "not slow and not gpu and not network and not real_model"

.PHONY: help serve test test-slow archs check types format soak bench bench-peers clean

help:
	@echo "make serve      install, fetch SmolLM2, compile it, serve it on :8000   (ARGS='port=9000 model=DIR')"
	@echo "make test       install and run the test suite, a worker per core       (ARGS='-k scheduler')"
	@echo "make test-slow  the tests marked slow, network and real_model"
	@echo "make archs      every model family against transformers: graph/ARCHITECTURES.md  (ARCHS_COMPILE=1: compiled)"
	@echo "make check      lint, format and types (make types: types alone, of the tests too)"
	@echo "make soak       10 minutes of mixed traffic against SmolLM2, then everything is checked  (ARGS='--seconds 60')"
	@echo "make bench      speed on conf/bench/workloads.json                     (ARGS='model=DIR')"
	@echo "make bench-peers the same beside OpenVINO GenAI and vLLM, which it installs  (ARGS='--peers vllm')"

# torch is installed by its pinned version first: an open range would pull a CUDA build. xgrammar, the second
# backend of structured output, comes without what it names (a torch with triton); its tests are skipped without it.
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --disable-pip-version-check "$$(grep '^torch==' constraints.txt)"
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[dev]'
	-$(BIN)/python -m pip install -q --disable-pip-version-check --no-deps -c constraints.txt xgrammar apache-tvm-ffi
	$(BIN)/python -m compileall -q __init__.py conf graph kernels passes runtime serve
	mkdir -p $(VENV)/src && ln -sfn "$(CURDIR)" $(VENV)/src/girih
	touch $@

serve: $(READY)
	$(BIN)/girih serve $(ARGS)

test: $(READY)
	$(BIN)/python -m pytest $(PARALLEL) -m $(FAST) $(ARGS)

test-slow: $(READY)
	$(BIN)/python -m pytest -m "slow or network or real_model" $(ARGS)

# About 15 minutes on two cores. Compiling all tiles takes hours: a run with ARCHS_COMPILE=1 goes on where the
# one before it ended; ARCHS_SECONDS=N starts no further family after that time.
archs: $(READY)
	ARCHS_TABLE=graph/ARCHITECTURES.md $(BIN)/python -m pytest -q -m slow tests/graph/trace/test_architectures.py $(ARGS)

# mypy reads the package through a link of its own name: the root directory may be called anything.
check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(MAKE) types

types: $(READY)
	MYPYPATH=$(VENV)/src $(BIN)/mypy -p girih
	cd tests && MYPYPATH=../$(VENV)/src ../$(BIN)/mypy .

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

soak: $(READY)
	$(BIN)/python tests/support/support_soak.py $(ARGS)

bench: $(READY)
	$(BIN)/girih bench offline $(ARGS)

bench-peers: $(READY)
	$(BIN)/python tests/bench/measure_peers.py $(ARGS)

clean:
	rm -rf build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
