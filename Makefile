# `make help` lists the targets. Everything goes to target/ (or CARGO_TARGET_DIR).

.DEFAULT_GOAL := help
.PHONY: help setup build install uninstall demo demo-gateway demo-shared passthrough bench-programs test test-fips torture torture-guest soak soak-shared fuzz lint setup-bench bench bench-paper bench-smoke clean

help: ## lists the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: ## installs what is missing: Debian packages, the Rust toolchain, cargo-deny
	scripts/setup

build: ## builds `lamassu`, `lamassu-server` and nbdkit's plugin, optimised
	cargo build --locked --release --package lamassu --package lamassu-server --package lamassu-nbdkit

# `make build` as the user, then `make install` as root. Packagers set DESTDIR, and PREFIX=/usr.
PREFIX ?= /usr/local
# The only directory in which mount(8) looks for helpers.
SBINDIR ?= /sbin
bindir = $(DESTDIR)$(PREFIX)/bin
sharedir = $(DESTDIR)$(PREFIX)/share
unitdir = $(DESTDIR)$(PREFIX)/lib/systemd/system
sysusersdir = $(DESTDIR)$(PREFIX)/lib/sysusers.d
plugindir = $(DESTDIR)$(PREFIX)/lib/lamassu
program = $(or $(CARGO_TARGET_DIR),target)/release/lamassu
# A build of tests alone leaves it in deps.
plugin = $(or $(wildcard $(dir $(program))liblamassu_nbdkit.so),$(dir $(program))deps/liblamassu_nbdkit.so)
completions = bash-completion/completions/lamassu zsh/site-functions/_lamassu fish/vendor_completions.d/lamassu.fish

install: ## installs the programs, nbdkit's plugin, links for mount(8), shell completions, the units of server, gateway, proxy and volumes (PREFIX=/usr/local DESTDIR=)
	@test -x $(program) || { echo "there is no $(program): run make build first" >&2; exit 1; }
	install -D -m 755 $(program) $(bindir)/lamassu
	install -D -m 755 $(program)-server $(bindir)/lamassu-server
	install -D -m 644 $(plugin) $(plugindir)/nbdkit-lamassu-plugin.so
	install -d $(unitdir) $(sysusersdir)
	sed 's|/usr/local/bin/|$(PREFIX)/bin/|' dist/lamassu-server.service > $(unitdir)/lamassu-server.service
	sed 's|/usr/local/bin/|$(PREFIX)/bin/|' dist/lamassu-gateway@.service > $(unitdir)/lamassu-gateway@.service
	sed 's|/usr/local/bin/|$(PREFIX)/bin/|' dist/lamassu-proxy.service > $(unitdir)/lamassu-proxy.service
	sed 's|/usr/local/bin/|$(PREFIX)/bin/|' dist/lamassu-publish@.service > $(unitdir)/lamassu-publish@.service
	sed 's|/usr/local/bin/|$(PREFIX)/bin/|' dist/lamassu-volumes@.service > $(unitdir)/lamassu-volumes@.service
	install -m 644 dist/lamassu-server.sysusers $(sysusersdir)/lamassu-server.conf
	install -m 644 dist/lamassu-proxy.sysusers $(sysusersdir)/lamassu-proxy.conf
	install -d $(DESTDIR)$(SBINDIR) $(addprefix $(sharedir)/,$(dir $(completions)))
	ln -sf $(PREFIX)/bin/lamassu $(DESTDIR)$(SBINDIR)/mount.fuse.lamassu
	ln -sf $(PREFIX)/bin/lamassu $(DESTDIR)$(SBINDIR)/mount.lamassu
	$(program) completions bash > $(sharedir)/$(word 1,$(completions))
	$(program) completions zsh > $(sharedir)/$(word 2,$(completions))
	$(program) completions fish > $(sharedir)/$(word 3,$(completions))

uninstall: ## removes what `make install` installed (same PREFIX and DESTDIR)
	rm -f $(bindir)/lamassu $(bindir)/lamassu-server $(plugindir)/nbdkit-lamassu-plugin.so $(unitdir)/lamassu-server.service $(unitdir)/lamassu-gateway@.service $(unitdir)/lamassu-proxy.service $(unitdir)/lamassu-publish@.service $(unitdir)/lamassu-volumes@.service $(sysusersdir)/lamassu-server.conf $(sysusersdir)/lamassu-proxy.conf $(addprefix $(DESTDIR)$(SBINDIR)/,mount.fuse.lamassu mount.lamassu) $(addprefix $(sharedir)/,$(completions))

demo: setup build ## shows on real data that the ciphertext deduplicates (a few minutes)
	scripts/demo

demo-shared: setup build ## shows a vault that two hosts share under a trusted server (a minute; as root)
	scripts/demo-shared

demo-gateway: setup build ## shows access control at a provider that cannot read by what it decides (half a minute)
	scripts/demo-gateway

passthrough: ## builds the mount without encryption that benchmarks and xfstests compare with
	cargo build --locked --release --package lamassu-fuse --example passthrough

bench-programs: ## builds what benchmarks alone use: that mount, a mount whose ciphers are measured, and the ciphers by themselves
	cargo build --locked --release --package lamassu-fuse --package lamassu-crypto --package lamassu-store --package lamassu-server --features lamassu-crypto/measure --example load --example oblivious --example passthrough --example measured --example speed --example tree

test: ## runs every check within its time budget, and sums up the counts
	scripts/test

test-fips: ## builds with the FIPS module of AWS-LC (feature `fips`; takes cmake and Go) and runs the tests of the ciphers and of `--fips`
	scripts/setup --fips
	cargo test --locked --package lamassu-crypto --features fips
	cargo test --locked --package lamassu --features fips --test cli -- fips golden leaks

torture: build ## random operations, killed daemons, power cuts, damage, failing stores, sshfs, backups, shared mounts, in real mounts (12 minutes); then millions of simulated crashes, and crowds of sessions
	tests/torture/run
	tests/torture/simulate
	cargo build --locked --release -p lamassu-gateway --example s3s-fs
	LAMASSU_PROVIDERS=all cargo test --locked --release -p lamassu-gateway --test it -- --include-ignored --nocapture remote::
	cargo test --locked --release -p lamassu --test cli -- --ignored --nocapture destroy::
	cargo test --locked --release -p lamassu-server --test it -- --ignored --nocapture --test-threads=1 crowds::

torture-guest: build ## a whole Debian on a volume: booted from NBD in qemu, written to, its server killed; two versions deduplicated (six minutes; as root)
	scripts/setup --guest
	tests/torture/guest

soak: build ## half an hour of mixed load, with the daemon's memory measured
	tests/torture/run --seconds 1800 soak

soak-shared: build ## half an hour of three hosts that share a vault, while hosts, server, network and disks fail (as root)
	tests/torture/run --seconds 1800 shared

fuzz: ## every decoder and the reader of backing files under a fuzzer, SECONDS each (60), JOBS at once (as many as processors)
	fuzz/run --seconds $(or $(SECONDS),60) --jobs $(or $(JOBS),$(shell nproc))

lint: ## formatting, clippy, dependencies, licences, and the width of prose
	scripts/test lint

setup-bench: ## installs what `bench` needs beside that: the peers, dbench, Postmark, matplotlib
	scripts/setup --bench

bench: build bench-programs ## measures everything beside the peers; results and summary in docs/benchmarks, the long report in target/bench (four hours, an idle machine)
	scripts/bench

bench-paper: build bench-programs ## the Lamassu paper's experiments alone
	scripts/bench paper

bench-smoke: build bench-programs ## every experiment at toy size: only that each runs
	scripts/bench --toy --out "$${CARGO_TARGET_DIR:-target}/bench-smoke" --report "$${CARGO_TARGET_DIR:-target}/bench-smoke/long"

clean: ## removes what was built
	cargo clean
	rm -rf .venv
