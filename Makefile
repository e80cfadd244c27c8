# Every command of this repository. `make help` lists them; each sets up what it needs in .venv.

PYTHON ?= python3

export VIRTUAL_ENV := $(CURDIR)/.venv
export PATH := $(VIRTUAL_ENV)/bin:$(PATH)
# maturin refuses to guess when conda's environment is active beside ours.
unexport CONDA_PREFIX
export PYTHON
# Torch's wheels are large, and not every line is fast.
export UV_HTTP_TIMEOUT := 300

# Each recipe line is a stage: named, timed, and listed by .ci/run.
stage := @tools/stage
cargo_test := $(shell command -v cargo-nextest >/dev/null && echo nextest run || echo test --tests)

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help run check test wheel release-wheel headers bench sabotage loom fix pages images lock clean \
	develop install-wheel rust loom-models python-checks python-without-torch python-with-torch

help: ## List these commands
	@echo "make <command>:"
	@sed -nE 's/^([a-z-]+):[^#]*## (.*)/  \1|\2/p' $(MAKEFILE_LIST) | awk -F '|' '{ printf "%-15s%s\n", $$1, $$2 }'

run: develop ## Set everything up and run `rallocator demo` on what this machine has
	rallocator demo

check: rust develop python-without-torch ## Every check that needs no GPU and no torch: the inner loop

test: rust loom-models $(VIRTUAL_ENV)/torch headers install-wheel python-with-torch ## Every check that needs no GPU; fetches torch and headers (8 GB once)

wheel: $(VIRTUAL_ENV)/tools ## Build dist/*.whl and check what its name claims
	$(stage) "wheel: bridges" python tools/build_bridges.py
	$(stage) "wheel: build" tools/build_wheel
	$(stage) "wheel: check" python tools/check_wheel.py

release-wheel: $(VIRTUAL_ENV)/tools ## The same with a bridge for every release of torch; fetches 7 GB once
	$(stage) "headers of every torch" python tools/torch_headers.py --all
	$(stage) "a bridge for every torch" python tools/build_bridges.py --all
	$(MAKE) wheel

headers: $(VIRTUAL_ENV)/tools ## Fetch the headers that the tests compile the bridge against; 3 GB once, 10 MB kept
	$(stage) "headers of torch" python tools/torch_headers.py

bench: ## Nanoseconds and instructions of the core on the simulated GPU
	cargo bench --locked -p alloc-core --features sim

sabotage: $(VIRTUAL_ENV)/tools ## Plant faults in the core, one by one: the tests must catch each
	python tools/sabotage.py

loom: loom-models ## Check every interleaving of the core's locks

fix: $(VIRTUAL_ENV)/tools ## Format everything, and mend what the linters can mend
	cargo fmt --all
	ruff check --fix
	ruff format

pages: develop ## Write what follows from runs: README.md, docs/gpu-results.md, examples in docs
	python tools/write_readme.py
	python tools/write_replay_docs.py
	python -m bench.gpu.report

images: develop ## Take the pictures of the report in docs/images, with Debian's Chromium
	python tools/write_images.py

lock: $(VIRTUAL_ENV)/tools ## Pin the newest versions of all dependencies
	cargo update
	tools/lock_requirements

clean: ## Remove everything that these commands made
	rm -rf .venv dist target build python/rallocator/bridge/prebuilt .mypy_cache .pytest_cache .ruff_cache .hypothesis python/rallocator/_core*.so

# Set-up.

$(VIRTUAL_ENV)/tools: tools/make_venv requirements/uv.txt requirements/dev.txt
	$(stage) "set-up" tools/make_venv
	@touch $@

$(VIRTUAL_ENV)/torch: $(VIRTUAL_ENV)/tools requirements/torch.txt
	$(stage) "torch" uv pip install --quiet --no-deps --require-hashes -r requirements/torch.txt
	@touch $@

develop: $(VIRTUAL_ENV)/tools
	$(stage) "build for this machine" maturin develop --quiet --release --locked --uv

# The wheel itself is what is tested, not the checkout: what is missing in it is missed.
install-wheel: wheel
	$(stage) "wheel: install" uv pip install --quiet --no-deps --reinstall dist/*.whl

# Checks.

# PyO3 asks the Python of the environment about itself.
rust: $(VIRTUAL_ENV)/tools
	$(stage) "rustfmt" cargo fmt --all --check
	$(stage) "clippy: core alone" cargo clippy --quiet --locked -p alloc-core --no-default-features -- -D warnings
	$(stage) "clippy: core, sim" cargo clippy --quiet --locked -p alloc-core --all-targets --features sim -- -D warnings
	$(stage) "clippy: core, cuda" cargo clippy --quiet --locked -p alloc-core --all-targets --features cuda -- -D warnings
	$(stage) "clippy: all" cargo clippy --quiet --locked --workspace --all-targets --all-features -- -D warnings
	$(stage) "rustdoc" env RUSTDOCFLAGS="-D warnings" cargo doc --quiet --locked --workspace --all-features --no-deps
	$(stage) "Rust tests" cargo $(cargo_test) --locked --workspace --all-features
	$(stage) "Rust doctests" cargo test --quiet --doc --locked --workspace --all-features

loom-models:
	$(stage) "loom" env RUSTFLAGS="--cfg loom" CARGO_TARGET_DIR=target/loom \
		cargo test --locked --release -p alloc-core --features sim --test loom -- --nocapture

python-without-torch: python-checks
	$(stage) "pytest, without torch" python -m pytest -m "not torch"

python-with-torch: python-checks
	$(stage) "pytest" python -m pytest

python-checks: $(VIRTUAL_ENV)/tools
	$(stage) "ruff" ruff check
	$(stage) "ruff format" ruff format --check
	$(stage) "mypy" mypy
	$(stage) "stubtest" python -m mypy.stubtest rallocator._core --allowlist tests/stubtest_allowlist.txt
