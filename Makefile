.DEFAULT_GOAL := help
.PHONY: help setup horovod run papers test test-all test-breaches lint format bench bench-loaders bench-oracle oracle-published chaos docs docs-site

# What needs root (Slurm, Open MPI from Debian) the tests install themselves, or they say why they skip.
# Three files at a time on two cores: many tests wait for other processes, and for a timeout that must pass.
# Containers often set PYTHONDONTWRITEBYTECODE: every process would compile the sources and the tests again.
PYTEST = PYTHONDONTWRITEBYTECODE= .venv/bin/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-15s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: ## make .venv with the versions of constraints.txt and ddlbench in it
	@scripts/setup.sh

run: setup ## a small ResNet with one process and with two, to a table and a report (about 4 minutes)
	@scripts/demo.sh

papers: setup horovod ## the figures of the papers in miniature, from runs on this machine (about an hour on two cores)
	@scripts/papers.sh

# Where it cannot be built, its tests skip and say so; everything else is tested all the same.
horovod: setup ## build Horovod for CPUs and put it into .venv
	@scripts/install_horovod.sh gloo || echo "make: Horovod's tests will be skipped" >&2

test: setup horovod ## the test suite (10 to 12 minutes on two cores)
	$(PYTEST) -m "not slow"

test-all: setup horovod ## the test suite with its slow tests (over an hour)
	$(PYTEST)

test-breaches: setup ## plant every wrong way to measure of tests/breaches: each must be noticed (about 13 minutes)
	.venv/bin/python -m tests.breaches

# MINUTES=30 SEED=7 make chaos: each trial follows from the seed and its number
chaos: setup horovod ## kill, stop and signal random ranks of all frameworks for ten minutes: what is lost, what hangs
	.venv/bin/python -m tests.faults.chaos --minutes $(or $(MINUTES),10) --seed $(or $(SEED),0)

lint: setup ## ruff, pyright, shellcheck
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/pyright
	.venv/bin/pyright -p tests
	.venv/bin/shellcheck scripts/*.sh scripts/slurm/*.sh scripts/slurm/run.sbatch scripts/slurm/site/*.sh scripts/container/*.sh .ci/run

format: setup ## let ruff format the code
	.venv/bin/ruff check --fix .
	.venv/bin/ruff format .

bench: setup horovod ## what the harness costs, beside scripts that use each library alone
	.venv/bin/python -m benchmarks.overhead

bench-loaders: setup ## how fast data are read, beside scripts that use each library alone
	.venv/bin/python -m benchmarks.loaders

bench-oracle: setup ## measured steps of 2 and 4 processes beside what the oracle predicts from one (about 25 minutes)
	.venv/bin/python -m benchmarks.oracle

oracle-published: setup ## published measurements beside the oracle, also with constants chosen without their source (10 to 20 minutes)
	.venv/bin/python -m benchmarks.published benchmarks/measured/points.csv benchmarks/measured/gpt_layouts.csv

docs: setup ## make the pages that come from the code: data dictionary, frameworks
	.venv/bin/python -m scripts.pages.data_dictionary > docs/data-dictionary.md
	.venv/bin/python -m scripts.pages.frameworks > docs/frameworks.md

docs-site: setup ## the documents as a site in build/site
	NO_MKDOCS_2_WARNING=1 .venv/bin/mkdocs build
