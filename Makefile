# `make demo` and `make test` do all set-up on a fresh machine. docs/building.md explains.

PYTHON ?= python3
UMEM_CUDA ?= 13
JOBS ?= $(shell nproc)
# One more than cores: tests wait for processes that they start, and for time to pass.
WORKERS ?= $(shell expr $(JOBS) + 1)
MARKED ?= slow or not slow
FUZZ_MINUTES ?= 10
CHAOS_MINUTES ?= 20
SOUND_MINUTES ?= 8
# Drawn uses of tensors, beside the programs.
READERS ?= 600
# Of `make wheels`: native, x86_64 or aarch64.
ARCHS ?= native
GPU := $(wildcard /dev/nvidiactl)
CPU_INDEX := https://download.pytorch.org/whl/cpu
export UMEM_CUDA
# Processes that tests start load modules that another one has compiled.
unexport PYTHONDONTWRITEBYTECODE
export CMAKE_BUILD_PARALLEL_LEVEL ?= $(JOBS)

ifeq (,$(filter 12 13 none,$(UMEM_CUDA)))
$(error UMEM_CUDA is '$(UMEM_CUDA)'; make knows 12, 13 and none, and docs/building.md the rest)
endif

BIN := .venv/bin
COMMA := ,
EMPTY :=
# Of names of native tests: the option of ctest that leaves them out.
without = --exclude-regex '^($(subst $(EMPTY) ,|,$(strip $(1))))$$'
PIP := $(BIN)/python -m pip --disable-pip-version-check
CONSTRAINTS := constraints.txt $(wildcard constraints-cuda$(UMEM_CUDA).txt)
# Bytecode of the packages is made when they are imported: of most it never is, and it takes pip
# three quarters of its time.
PIP_INSTALL = $(PIP) install --quiet --no-compile $(addprefix -c ,$(CONSTRAINTS))
CUDA_EXTRA := $(if $(filter-out none,$(UMEM_CUDA)),cuda$(UMEM_CUDA)$(COMMA))

# What builds the extension; constraints.txt holds the versions. CUDA's as in pyproject.toml.
BUILD_TOOLS := scikit-build-core nanobind cmake ninja
BUILD_TOOLS_12 := librmm-cu12 nvidia-cuda-runtime-cu12 nvidia-cuda-nvcc-cu12
BUILD_TOOLS_13 := librmm-cu13 nvidia-cuda-runtime nvidia-cuda-crt
# As the extra `docs` in pyproject.toml has them.
DOCS_TOOLS := mkdocs-material mkdocstrings-python

NATIVE_SOURCES := CMakeLists.txt $(shell find cmake allocators guard -type f)
# Their times change with the set of modules, which an editable install lists when it is made.
PACKAGE_FOLDERS := $(shell find umem -type d -not -name __pycache__)
NATIVE_TESTS := plain address thread
LOCKS := 12 13

# QEMU's user emulator ignores MADV_DONTFORK, which pinned_memory tests; hint_load takes it minutes.
EMULATOR_SKIPS := pinned_memory hint_load
# Before version 8 it also keeps a table of all pages of address space that a test reserves, tens of
# gigabytes, and fails an assertion of its own where threads start in a forked child.
EMULATOR_SKIPS_7 := aliases device_budget driver_failures expandable_segments hint_fork pause pause_threads stress
# Pages of 64 KiB, as Grace's kernels often have: QEMU before version 9 pretends to have them. It loses
# a mapping of class_context.
EMULATOR_SKIPS_64K := class_context

.PHONY: help demo test check fast-tests lint native native-test test-aarch64 compiled pytest fuzz chaos sound bench systems goals docs pictures lock wheel wheels clean
.DEFAULT_GOAL := help

help:
	@echo 'make demo         set up, then run the demonstration (.venv/bin/umem demo)'
	@echo 'make test         set up, then lint, native tests with and without sanitizers, pytest'
	@echo 'make native       the virtual environment with umem built and installed in it'
	@echo 'make check        lint, types and the fast tests: under two minutes'
	@echo 'make lint         ruff, import contracts and mypy'
	@echo 'make native-test  the allocator core under no sanitizer, ASan with UBSan, and TSan'
	@echo 'make test-aarch64 the allocator core for 64-bit Arm, under QEMU'
	@echo 'make pytest       all Python tests; MARKED="not slow" for the quick ones'
	@echo 'make fuzz         readers of files from strangers, FUZZ_MINUTES=10 for each'
	@echo 'make chaos        killed, interrupted, forked and starved trainings, CHAOS_MINUTES=20 in all'
	@echo 'make sound        programs that read what a step still writes, SOUND_MINUTES=8 in all (needs a GPU)'
	@echo 'make bench        benchmarks (needs a GPU)'
	@echo 'make systems      Trainer, TRL, DeepSpeed, Megatron and others under umem (needs a GPU)'
	@echo 'make goals        programs of other fields beside stock and their own checkpoints (needs a GPU)'
	@echo 'make docs         the pages as a site in site/, without a network, links checked'
	@echo 'make pictures     docs/pictures from committed results'
	@echo 'make lock         .github/requirements: what CI installs, with hashes'
	@echo 'make wheel        a wheel in dist/, built in isolation'
	@echo 'make wheels       manylinux wheels for CUDA 12 and 13, Python 3.11 to 3.13 (needs docker)'
	@echo 'make clean        remove the build folders; the virtual environment stays'
	@echo 'variables: PYTHON=$(PYTHON) JOBS=$(JOBS) UMEM_CUDA=$(UMEM_CUDA) (12, 13 or none; make clean and rm -r .venv between)'

demo: native
	@echo 'umem: the demonstration'
	$(BIN)/umem demo

# Side by side what waits for downloads and what compiles, then what keeps only one core busy each:
# at the end one of them would leave the others idle. ASan's build runs all that the plain one does.
test:
	$(MAKE) --jobs=2 --output-sync=line native native-test-thread
	$(MAKE) --jobs=2 --output-sync=line compiled lint native-test-address
	$(MAKE) pytest

# What to run before each commit: `make test` also runs what trains, builds or starts processes.
check: native
	$(MAKE) --jobs=2 --output-sync=line lint fast-tests

fast-tests: native
	$(BIN)/python -m pytest -q -n $(JOBS) --dist worksteal -m "not gpu and not slow" $(PYTEST_ARGS)

lint: native
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-logo
	$(BIN)/mypy
	$(BIN)/python benchmarks/fill_pages.py --check README.md docs/out-of-memory.md

# The planner, and bytecode of tests and of what they import. Compiled and kept once: the workers of
# the tests would each do it, at the same time.
compiled: native
	PYTHONPATH=benchmarks $(BIN)/python -m umem_bench.compile_planner
	-$(BIN)/python -m pytest --collect-only -qq >/dev/null  # `make pytest` says what is wrong

# Side by side, but for the tests on a GPU, which share its memory. Without one they are skipped.
pytest: native
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m "$(if $(GPU),not gpu and )($(MARKED))" $(PYTEST_ARGS)
	$(if $(GPU),$(BIN)/python -m pytest -m "gpu and ($(MARKED))" $(or $(PYTEST_ARGS),tests/gpu tests/chaos tests/sound))

fuzz: native
	PYTHONPATH=tests/support:tests/fuzz:benchmarks $(BIN)/python tests/fuzz/fuzz.py \
	  --minutes $(FUZZ_MINUTES) --output benchmarks/results/fuzz.txt

chaos: native
	PYTHONPATH=tests/support:tests/chaos:benchmarks $(BIN)/python tests/chaos/campaign.py \
	  --minutes $(CHAOS_MINUTES) --output benchmarks/results/chaos.txt

sound: native
	PYTHONPATH=tests/support:benchmarks $(BIN)/python tests/sound/sound.py \
	  --readers $(READERS) --minutes $(SOUND_MINUTES) --output benchmarks/results/sound.jsonl

bench: native
	$(BIN)/umem bench all

systems: native
	PYTHONPATH=benchmarks $(BIN)/python tests/systems/matrix.py --size large --deterministic \
	  --minutes 60 --output benchmarks/results/systems.jsonl

goals: native
	PYTHONPATH=benchmarks $(BIN)/python tests/systems/matrix.py --goals --size large \
	  --steps 64 --deterministic --minutes 120 --output benchmarks/results/goals.jsonl

docs: .venv/docs.stamp
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

pictures: native
	PYTHONPATH=benchmarks $(BIN)/python -m umem_bench.pictures docs/pictures

# Later releases of what constraints*.txt leave open, with the hashes of their files.
lock: $(LOCKS:%=lock-%)

lock-%: .venv/tools.stamp
	$(PIP_INSTALL) uv
	printf '%s\n' $(BUILD_TOOLS_$*) | $(BIN)/uv pip compile --quiet --upgrade --universal \
	  --python-version 3.11.5 --generate-hashes --excludes .github/requirements/excluded.txt \
	  --custom-compile-command 'make lock' --extra cuda$* --extra dev --extra docs --extra examples \
	  --extra plots -c constraints.txt -c constraints-cuda$*.txt \
	  -o .github/requirements/cuda$*.txt pyproject.toml .github/requirements/ci.in -

wheel: .venv/tools.stamp
	$(PIP) wheel --no-deps --wheel-dir dist .

# Wheels for CUDA 12 and 13 have the same names, hence a folder for each.
wheels: .venv/tools.stamp
	@docker info >/dev/null 2>&1 || { echo 'make wheels needs a docker daemon: it builds in containers' >&2; exit 1; }
	$(PIP_INSTALL) cibuildwheel
	UMEM_CUDA=12 $(BIN)/cibuildwheel --archs $(ARCHS) --output-dir dist/cuda12
	UMEM_CUDA=13 $(BIN)/cibuildwheel --archs $(ARCHS) --output-dir dist/cuda13

native: .venv/native.stamp

.venv/tools.stamp: $(CONSTRAINTS) Makefile
	@echo 'umem, step 1 of 3: .venv and the build tools'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(PIP_INSTALL) $(BUILD_TOOLS) $(BUILD_TOOLS_$(UMEM_CUDA))
	touch $@

# Editable, so that Python sources are used where they are; the extensions lie in site-packages. The
# guard is built for the torch that is there.
.venv/native.stamp: .venv/tools.stamp pyproject.toml umem/_version.py $(NATIVE_SOURCES) \
  $(PACKAGE_FOLDERS)
	@echo 'umem, step 2 of 3: torch, gigabytes unless it is installed or in the cache of pip'
	$(if $(GPU)$(PIP_EXTRA_INDEX_URL)$(PIP_INDEX_URL),,@echo '  no GPU here: the CPU build is enough, and small: PIP_EXTRA_INDEX_URL=$(CPU_INDEX) make $(or $(MAKECMDGOALS),demo)')
	$(PIP_INSTALL) torch
	@echo 'umem, step 3 of 3: other packages, then the native library, compiled with $(JOBS) jobs'
	$(PIP_INSTALL) --no-build-isolation \
	  --config-settings=build-dir=build/python \
	  --editable '.[$(CUDA_EXTRA)dev,examples,plots]'
	$(BIN)/python -m compileall -q umem  # a __pycache__ made later would change a folder's time
	touch $@

.venv/docs.stamp: .venv/native.stamp
	$(PIP_INSTALL) $(DOCS_TOOLS)
	touch $@

# The core needs no Python; the order-only tools bring CMake.
native-test: $(NATIVE_TESTS:%=native-test-%)

native-test-%: .venv/tools.stamp
	$(BIN)/cmake -S . -B build/$* -G Ninja -DCMAKE_MAKE_PROGRAM=$(CURDIR)/$(BIN)/ninja \
	  -DUMEM_PYTHON=OFF -DUMEM_WERROR=ON -DUMEM_SANITIZE=$(filter-out plain,$*)
	$(BIN)/cmake --build build/$*
	$(BIN)/ctest --test-dir build/$* --parallel $(JOBS) --output-on-failure --no-tests=error

test-aarch64: QEMU = $(shell qemu-aarch64 --version 2>/dev/null | sed -n 's/.* version \([0-9]*\).*/\1/p')
test-aarch64: SKIPS = $(EMULATOR_SKIPS) $(if $(filter 5 6 7,$(QEMU)),$(EMULATOR_SKIPS_7))
test-aarch64: CTEST = $(BIN)/ctest --test-dir build/aarch64 --parallel $(JOBS) --output-on-failure --no-tests=error
test-aarch64: .venv/tools.stamp
	@command -v aarch64-linux-gnu-g++ >/dev/null && command -v qemu-aarch64 >/dev/null || \
	  { echo 'make test-aarch64 needs apt-get install g++-aarch64-linux-gnu qemu-user' >&2; exit 1; }
	$(BIN)/cmake -S . -B build/aarch64 -G Ninja -DCMAKE_MAKE_PROGRAM=$(CURDIR)/$(BIN)/ninja \
	  --toolchain cmake/aarch64-linux-gnu.cmake -DUMEM_PYTHON=OFF -DUMEM_WERROR=ON
	$(BIN)/cmake --build build/aarch64
	$(CTEST) $(call without,$(SKIPS))
	$(if $(filter 5 6 7 8,$(QEMU)),QEMU_PAGESIZE=65536 \
	  $(CTEST) $(call without,$(SKIPS) $(EMULATOR_SKIPS_64K)))

clean:
	rm -rf build dist site .pytest_cache .mypy_cache .ruff_cache .hypothesis
	rm -f .venv/*.stamp
