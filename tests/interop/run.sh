#!/usr/bin/env bash
# Compare a vault, read by the independent reader, with the plain tree it was made from.
#
#   tests/interop/run.sh                               the reader's own tests
#   tests/interop/run.sh VAULT_DIR KEYSOURCE PLAIN_DIR verify the vault and compare the trees
#   tests/interop/run.sh VAULT_DIR KEYSOURCE           verify the vault alone
#
# KEYSOURCE is raw:FILE, hex:FILE, passphrase:FILE or FILE. With INTEROP_XATTRS=1 extended attributes are compared too.
# The Python packages live in .venv at the root of the repository, or where INTEROP_VENV says.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
venv=${INTEROP_VENV:-$(cd "$here/../.." && pwd)/.venv}
if ! cmp -s "$here/requirements.txt" "$venv/interop-requirements.txt"; then
    python3 -m venv "$venv"
    "$venv/bin/pip" install --quiet --disable-pip-version-check -r "$here/requirements.txt"
    cp "$here/requirements.txt" "$venv/interop-requirements.txt"
fi

export PYTHONPATH=$here PYTHONDONTWRITEBYTECODE=1
if [ "${1:-}" = --prepare ]; then exit; fi # the packages alone, for golden.sh
if [ $# -eq 0 ]; then
    cd "$here"
    exec "$venv/bin/python" -m unittest test_reader
fi
if [ $# -lt 2 ] || [ $# -gt 3 ]; then
    sed -n '2,9s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" >&2
    exit 2
fi

reader=("$venv/bin/python" -m lamassu_reader)
"${reader[@]}" verify --key "$2" "$1"
if [ $# -eq 3 ]; then
    temp=$(mktemp -d)
    trap 'rm -rf "$temp"' EXIT
    attributes=()
    if [ "${INTEROP_XATTRS:-0}" = 1 ]; then attributes=(--xattrs); fi
    "${reader[@]}" tree-hash "${attributes[@]}" --key "$2" "$1" >"$temp/vault"
    "${reader[@]}" tree-hash "${attributes[@]}" --plain "$3" >"$temp/plain"
    diff -u "$temp/plain" "$temp/vault"
    echo "the same tree: $(wc -l <"$temp/vault") entries"
fi
