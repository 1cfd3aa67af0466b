.PHONY: setup horovod run test test-all lint format bench bench-loaders docs

# What needs root (Slurm, Open MPI from Debian) the tests install themselves, or they say why they skip.
# Two files at a time: most tests keep one core busy.
PYTEST = .venv/bin/python -m pytest -n 2 --dist loadfile

setup:
	@scripts/setup.sh

run: setup
	@scripts/demo.sh

# Where it cannot be built, its tests skip and say so; everything else is tested all the same.
horovod: setup
	@scripts/install_horovod.sh gloo || echo "make: Horovod's tests will be skipped" >&2

test: setup horovod
	$(PYTEST) -m "not slow"

test-all: setup horovod
	$(PYTEST)

lint: setup
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/pyright

format: setup
	.venv/bin/ruff check --fix .
	.venv/bin/ruff format .

bench: setup horovod
	.venv/bin/python benchmarks/overhead.py

bench-loaders: setup
	.venv/bin/python -m benchmarks.loaders

docs: setup
	.venv/bin/python -m ddlbench.results.schema > docs/data-dictionary.md
	.venv/bin/python -m ddlbench.support > docs/frameworks.md
