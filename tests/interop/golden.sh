#!/usr/bin/env bash
# The golden vaults of testdata/vaults, read by the independent reader with every key, against the tree-hash kept beside them.
#
#   tests/interop/golden.sh [DIR]            DIR is testdata/vaults, or another folder that testdata/make-vaults filled
#   tests/interop/golden.sh --write DIR      writes DIR/tree-hash from the plain tree first (testdata/make-vaults does that)
#
# Attributes are compared where the temporary folder takes them. Ends with a count.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
write=0
if [ "${1:-}" = --write ]; then
    write=1
    shift
fi
golden=$(realpath "${1:-$here/../../testdata/vaults}")
"$here/run.sh" --prepare
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

reader() { PYTHONPATH=$here PYTHONDONTWRITEBYTECODE=1 "${INTEROP_VENV:-$here/../../.venv}/bin/python" -m lamassu_reader "$@"; }
unpack() { tar --xattrs --xattrs-include='user.*' -C "$work" -xzf "$golden/$1.tar.gz"; }

wanted() { cat "$golden/tree-hash"; }
touch "$work/probe"
if ! setfattr -n user.probe -v 1 "$work/probe" 2>/dev/null; then
    echo "NOTE: no user attributes under $work: they are NOT compared"
    wanted() { grep -v '^x ' "$golden/tree-hash"; }
fi

unpack plain
if [ "$write" = 1 ]; then reader tree-hash --plain --xattrs "$work/plain" >"$golden/tree-hash"; fi

passed=0 failed=0
count() { # NAME COMMAND…: its output must be the tree, and it must have nothing to say of it
    local name=$1
    shift
    if "$@" 2>"$work/said" | diff -u <(wanted) - && ! [ -s "$work/said" ]; then
        passed=$((passed + 1))
    else
        failed=$((failed + 1))
        cat "$work/said"
        echo "FAIL  $name"
    fi
}
count plain reader tree-hash --plain --xattrs "$work/plain"
for suite in aes paper blake3 chacha aes-file aes-none blake3-none chacha-file aes-lz4 blake3-zstd; do
    rm -rf "$work/vault"
    unpack "$suite"
    for source in raw:key.raw hex:key.hex passphrase:key.passphrase; do
        count "$suite by $source" reader tree-hash --xattrs --key "${source%%:*}:$golden/${source#*:}" "$work/vault"
    done
done
echo "$passed passed, $failed failed"
[ "$failed" = 0 ]
