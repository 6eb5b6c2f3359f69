# Every target installs what it needs. `make` lists the targets.
SHELL := /bin/bash
.SHELLFLAGS := -Eeuo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

export PATH := $(CURDIR)/.venv/bin:$(PATH)
# Tests and benchmarks start Python a thousand times: keep its compiled files, whatever the shell's setting.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help
help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-18s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

# ---- environment -------------------------------------------------------------------------------------------------------
# PYTHON  the interpreter for .venv (default: the first that is 3.11 or newer)
# FLAVOR  the build of torch: cpu or gpu (CUDA's, 5 GB). Without it .venv keeps the one it has; a new one gets cpu
# IN      where bench, bench-gpu, test-gpu and gpu-trial run: venv (.venv, with torch's CUDA build on a machine with
#         GPUs) or image (the image of make image)
IN ?= venv
ON_DEVICES = @tools/on-devices.sh '$(IN)' '$(IMAGE)'

.PHONY: venv
venv: .venv/.$(or $(FLAVOR),full) ## Create .venv with everything that tests, checks and local runs need (FLAVOR=gpu: for GPUs)

.PHONY: venv-operator
venv-operator: .venv/.operator ## Create .venv with only what fab needs

LOCKS = locks/extras.txt locks/deepspeed.txt locks/torch.txt locks/dev.txt
.venv/.full: $(LOCKS) locks/train-cpu.txt tools/venv.sh
	@tools/venv.sh full

.venv/.cpu: $(LOCKS) locks/train-cpu.txt tools/venv.sh
	@tools/venv.sh full cpu

.venv/.gpu: $(LOCKS) locks/train-gpu.txt locks/torch-cuda.txt tools/venv.sh
	@tools/venv.sh full gpu

.venv/.%:
	@tools/venv.sh full '$*'

.venv/.operator: locks/operator.txt tools/venv.sh
	@tools/venv.sh operator

.venv/.extras: locks/extras.txt tools/venv.sh
	@tools/venv.sh extras

.venv/.docs: locks/docs.txt tools/venv.sh
	@tools/venv.sh docs

.venv/.trackers: locks/trackers.txt tools/venv.sh
	@tools/venv.sh trackers

.PHONY: trackers
trackers: .venv/.trackers ## Install wandb, MLflow, TensorBoard and apprise for runs on this machine, in .venv/trackers

.venv/.remote: locks/remote.txt tools/venv.sh
	@tools/venv.sh remote

.PHONY: remote
remote: .venv/.remote ## Install what reads data at https://, in .venv

.PHONY: locks
locks: .venv/.full ## Compile locks/*.in to locks/*.txt (UPGRADE=1 for newer versions)
	@python -m pip install --quiet --require-hashes -r locks/uv.txt
	@tools/lock.sh $(if $(UPGRADE),--upgrade)

.PHONY: docs
docs: .venv/.docs ## Build the documentation as a site in site/; fails on a broken link or anchor
	@NO_MKDOCS_2_WARNING=1 mkdocs build --strict
	@echo "site/index.html"

.PHONY: wheel
wheel: .venv/.full ## Build dist/tridock-VERSION-py3-none-any.whl, which works without this repository
	@python -m hatchling build --target wheel --directory dist

.PHONY: reference
reference: .venv/.extras ## Write the generated parts of configs/, docs/ and the README
	python tools/reference.py
	python tools/triage_reference.py
	python tools/jean_zay.py
	tridock plan configs/jean-zay/7.5b.yaml --nodes 4 --gpus-per-node 4 --gpu v100-32gb --plot docs/pictures/rank-map.svg >/dev/null

# ---- image -------------------------------------------------------------------------------------------------------------
# FLAVOR      gpu (NVIDIA's PyTorch image) or cpu (the twin's)
# BASE_IMAGE  another base image (default: the one for this machine's GPUs, else the newest; docs/gpus.md lists them)
# IMAGE       the name of the image
# CA          a file with the certificates of a proxy to the package indexes
BASE_IMAGE ?=
IMAGE ?= tridock:$(if $(filter cpu,$(FLAVOR)),cpu,latest)
# MEGATRON    the source of Megatron-LM v1.1.5: a git repository (URL or folder), a folder that holds pretrain_gpt2.py,
#             none, or auto: the one brought before, else upstream's repository, or no engine (the default with FLAVOR=cpu)
CA ?=
MEGATRON ?=
# TRACKERS    yes: with wandb, MLflow, TensorBoard and apprise, for trackers and notifications
TRACKERS ?=
export TRACKERS

.PHONY: image
image: ## Build the image: tridock:latest on NVIDIA's PyTorch image, or tridock:cpu with FLAVOR=cpu; and .venv for fab
	-@$(MAKE) --no-print-directory .venv/.operator
	@tools/build-image.sh '$(or $(FLAVOR),gpu)' '$(BASE_IMAGE)' '$(IMAGE)' '$(CA)' '$(MEGATRON)'
	@echo 'next: source .venv/bin/activate (or call ./fab), then: fab launch --hosts hostfile' >&2

REHEARSAL_BASE = tridock-rehearsal-base
.PHONY: image-rehearsal
image-rehearsal: .venv/.full ## Build the GPU image on a base like NVIDIA's, made here from packages, and test it
	@tools/base-image.sh
	@docker build --quiet --tag $(REHEARSAL_BASE) tests/rehearsal/base
	@KEEP_COMPOSE=1 tools/build-image.sh gpu $(REHEARSAL_BASE) tridock:rehearsal '$(CA)' none
	pytest tests/rehearsal -o timeout_func_only=true $(TESTS)

# ---- runs --------------------------------------------------------------------------------------------------------------

.PHONY: demo
demo: .venv/.extras ## Train a small GPT on two nodes: containers, or local processes without Docker
	@tools/demo.sh

.PHONY: bench-launch
bench-launch: .venv/.extras ## Compare the time to the first step of fab launch and of a manual deepspeed, on the twin
	@tools/build-image.sh cpu
	@tridock data demo
	@python tools/bench_launch.py

.PHONY: bench-check
bench-check: .venv/.operator ## Time fab check on 2 and on 16 nodes, as containers on this machine (BENCH='--nodes 32')
	@tools/build-image.sh cpu
	@python tools/bench_check.py $(BENCH)

.PHONY: bench-image
bench-image: .venv/.operator ## Time the image, and an edit of one line, on its way to 16 Docker hosts (BENCH='--hosts 4')
	@tools/build-image.sh cpu
	@python tools/bench_image.py $(BENCH)

.PHONY: bench-hosts
bench-hosts: .venv/.full ## Time the commands on 64 and 256 hosts beside ssh alone: real sshds, a stand-in for Docker (BENCH='--hosts 32')
	@python -m tests.bench_hosts $(BENCH)

.PHONY: soak
soak: .venv/.extras ## Check the losses under half an hour of random faults on the twin (SOAK='--seed 7 --minutes 5')
	@tools/build-image.sh cpu
	@tridock data demo
	@python tools/soak.py $(SOAK)

.PHONY: bench
bench: ## Benchmark engine torch on this machine's devices (BENCH=configs/bench/h200.yaml for another, IN=image)
	$(ON_DEVICES) tridock data demo
	$(ON_DEVICES) tridock bench $(or $(BENCH),configs/bench/small.yaml)

.PHONY: bench-gpu
bench-gpu: ## Benchmark every engine on this machine's GPUs (BENCH='--world 4 --gpu a100-80gb', IN=image)
	$(ON_DEVICES) tridock data demo
	$(ON_DEVICES) tridock bench configs/bench/engines.yaml $(or $(BENCH),--world $$(nvidia-smi --list-gpus | grep -c '^GPU '))

.PHONY: bench-data
bench-data: .venv/.full ## Compare tridock data preprocess with Megatron-LM's scripts: MB per core second, memory (BENCH='--input x.jsonl')
	@python -m tests.bench_data $(BENCH)

.PHONY: measure-memory
measure-memory: .venv/.full ## Measure the memory of CPU ranks of every engine, into tests/data/memory-cpu.json (MEASURE='torch-*')
	@python -m tests.memory.measure $(MEASURE)

.PHONY: bench-memory
bench-memory: .venv/.full ## Compare the planner's memory with measurements (BENCH='pp2 bf16')
	@python -m tests.memory.compare $(BENCH)

.PHONY: bench-planner
bench-planner: .venv/.full ## Compare the planner's times with published ones (BENCH='bloom mpt')
	@python -m tests.planner.compare $(BENCH)
	@$(if $(BENCH),,python -m tests.planner.errors)

# ---- checks ------------------------------------------------------------------------------------------------------------
# TESTS   more arguments for pytest, as TESTS='-k hostfile -x'
# SELECT  the markers that decide which tests run
# PART    which part of the test files to run, as PART=2/4: a part of each suite
TESTS ?=
SELECT ?= not full
CORES ?= $(shell nproc)
# More than cores: many of these tests wait for a process.
WORKERS ?= $(shell echo $$(( $(CORES) + 1 )))
PROCESS_WORKERS ?= $(shell echo $$(( 2 * $(CORES) + 1 )))
# Ranks wait for each other, for launchers and for what is stopped: three files at once, whatever the machine has.
RANK_WORKERS ?= 3
# The unit tests that import torch or DeepSpeed.
TORCH_TESTS = tests/unit/train tests/unit/compat tests/unit/deepspeed tests/memory
# Those that start processes and wait for them: commands of a node, supervisors, trackers, scripts, workers.
PROCESS_TESTS = tests/shell tests/unit/trackers \
    $(addsuffix .py,$(addprefix tests/unit/test_,command completion extras fabfile gpu_trial hostile_runs imports test_verdict user_input)) \
    $(addsuffix .py,$(addprefix tests/unit/data/test_,megatron_types preprocess preprocess_command preprocess_upstream \
    train_tokenizer workers)) \
    $(addsuffix .py,$(addprefix tests/unit/node/test_,agent evidence failover launcher_process node_report node_starter observed_ranks ports preflight \
    processes queue rank_logs rank_output rank_starter runs spare_lock verbs)) \
    $(addsuffix .py,$(addprefix tests/unit/ops/test_,attached code facts keys local_run logs put_files rendezvous sync sync_command \
    track)) \
    $(addsuffix .py,$(addprefix tests/unit/ops/slurm/test_,jobs own_program supervise)) \
    tests/unit/ops/image/test_pull.py tests/unit/remote/test_clock.py \
    $(addsuffix .py,$(addprefix tests/unit/train/test_,nvme process_group signals))
# What TESTS or SELECT selects may all be in the other half.
OR_NONE = || [[ $$? == 5 ]]
# Tests that call make themselves do not share the jobs of this one.
PYTEST = env -u MAKEFLAGS -u MFLAGS pytest -m '$(SELECT)' $(if $(PART),--part $(PART)) --report-log=.cache/tests/$(@:test-%=%).jsonl

.PHONY: lint
lint: .venv/.full ## Check formatting, types, shell scripts and the Dockerfile
	ruff check .
	ruff format --check .
	mypy
	tools/shell-scripts.sh | xargs shellcheck --external-sources
	hadolint Dockerfile Dockerfile.wrap $(wildcard tests/*/*/Dockerfile)

BLOCKS = unit-torch unit-others processes distributed integration

# One after the other: at once they are hardly quicker, and each waits twice as long for whatever it has started.
.PHONY: test
test: .venv/.full .venv/.trackers ## All tests but the full matrices (those with Docker are skipped where no engine answers)
	@rm -f .cache/tests/*.jsonl .cache/tests/*.cores
	-@$(MAKE) --no-print-directory --keep-going test-unit test-processes test-distributed test-integration
	@python tools/test_verdict.py .cache/tests $(BLOCKS)

.PHONY: test-verdict
test-verdict: ## Results so far of a `make test` that was interrupted
	@python tools/test_verdict.py --so-far .cache/tests $(BLOCKS)

.PHONY: test-full
test-full: ## All tests, the full matrices too; in parts with PART=1/4 and so on
	@$(MAKE) --no-print-directory test SELECT=

.PHONY: test-unit
test-unit: .venv/.full ## What needs no process, no ranks and no Docker
	@$(MAKE) --no-print-directory --jobs 2 --keep-going --output-sync=target test-unit-torch test-unit-others
	@grep -q '"TestReport"' .cache/tests/unit-*.jsonl || { echo "TESTS: selects no test" >&2; exit 5; }

# Two processes, one for each core: workers would each collect all tests again. One imports torch, and has the tests of
# data/ too, so that both take as long.
NO_PROCESSES = $(addprefix --ignore ,$(PROCESS_TESTS))
NO_RANKS = $(addprefix --ignore tests/,distributed integration gpu rehearsal)
.PHONY: test-unit-torch test-unit-others
test-unit-torch: .venv/.full
	@$(PYTEST) $(TORCH_TESTS) tests/unit/data $(NO_PROCESSES) $(TESTS) $(OR_NONE)
test-unit-others: .venv/.full
	@$(PYTEST) tests $(addprefix --ignore ,$(TORCH_TESTS) tests/unit/data) $(NO_PROCESSES) $(NO_RANKS) $(TESTS) $(OR_NONE)

.PHONY: test-processes
test-processes: .venv/.full ## Processes of Tridock's own, without ranks and Docker
	@$(PYTEST) $(PROCESS_TESTS) -n $(PROCESS_WORKERS) $(TESTS) $(OR_NONE)

.PHONY: test-distributed
test-distributed: .venv/.full ## Several ranks on this machine's CPU
	$(PYTEST) tests/distributed -n $(RANK_WORKERS) --dist loadfile --no-loadscope-reorder $(TESTS)

.PHONY: test-torch
test-torch: ## The unit tests of train/ with another torch (TORCH=2.6.0), megatron-core (CORE=0.19.2) and PYTHON
	@CORE='$(CORE)' PYTHON='$(PYTHON)' tools/test-torch.sh $(or $(TORCH),2.6.0) $(TESTS)

.PHONY: test-integration
test-integration: .venv/.full ## A real engine: the image, the twin, hosts reached over ssh
	@# A test's limit is its own: the first ones wait for the image, which takes minutes where nothing is cached.
	$(PYTEST) tests/integration -n $(WORKERS) -o timeout_func_only=true $(TESTS)

.PHONY: test-gpu
test-gpu: ## Every engine on this machine's GPU (IN=image: in the image)
	$(ON_DEVICES) python -m pytest --confcutdir tests/gpu tests/gpu $(TESTS)

.PHONY: gpu-trial
gpu-trial: ## Every engine, its speed, memory and faults on this machine's GPU in eight minutes (STEPS='3 ddp', BUDGET=900, IN=image)
	$(ON_DEVICES) python tools/gpu_trial.py $(if $(STEPS),--steps $(STEPS)) $(if $(BUDGET),--budget $(BUDGET))

.PHONY: gpu-wheels
gpu-wheels: .venv/.full ## Collect what a bare machine with a GPU, torch and no network lacks for tools/gpu_trial.py (MEGATRON=…)
	@tools/gpu-wheels.sh .cache/gpu-wheels '$(or $(MEGATRON),$(TRIDOCK_MEGATRON),none)'

.PHONY: clean
clean: ## Remove .venv, caches and the twin's containers and keys; keep runs/ and data/
	-@docker compose --project-name tridock-twin-$$(printf %s '$(CURDIR)' | sha256sum | cut -c1-8) --profile twin down --timeout 5 2>/dev/null
	rm -rf .venv .mypy_cache .pytest_cache .ruff_cache .hypothesis .tridock *.egg-info dist site locks/wheels/*.whl
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
