# `make help` lists the targets. Everything goes to target/ (or CARGO_TARGET_DIR).

.DEFAULT_GOAL := help
.PHONY: help setup build demo test torture fuzz lint bench-smoke clean

help: ## lists the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: ## installs what is missing: Debian packages, the Rust toolchain, cargo-deny
	scripts/setup

build: ## builds the `lamassu` program, optimised
	cargo build --locked --release --package lamassu

demo: setup build ## shows on real data that the ciphertext deduplicates (a few minutes)
	scripts/demo

test: ## runs every check within its time budget, and sums up the counts
	scripts/test

torture: build ## random operations, killed daemons, power cuts, damage and full stores, in real mounts (10 minutes)
	tests/torture/run

fuzz: ## every decoder and the reader of backing files under a fuzzer, SECONDS each (60), JOBS at once (as many as processors)
	fuzz/run --seconds $(or $(SECONDS),60) --jobs $(or $(JOBS),$(shell nproc))

lint: ## formatting, clippy, dependencies and licences
	scripts/test lint

bench-smoke: build ## sequential reads and writes beside gocryptfs, over tmpfs
	scripts/bench-smoke

clean: ## removes what was built
	cargo clean
	rm -rf .venv
