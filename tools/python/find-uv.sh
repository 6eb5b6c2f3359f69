#!/usr/bin/env bash
# Prints the path of uv: the one on the PATH, or else the locked one, which is fetched once per user.
#
#   tools/python/find-uv.sh PYTHON
set -Eeuo pipefail

readonly PYTHON=$1
LOCK=$(dirname "$(readlink -f "$0")")/../../locks/uv.txt
VERSION=$(sed -n 's/^uv==\([^ ]*\).*/\1/p' "$LOCK")
readonly LOCK VERSION FOLDER=${XDG_CACHE_HOME:-$HOME/.cache}/tridock/uv-$VERSION

if command -v uv; then
    exit
fi
if [[ ! -x $FOLDER/bin/uv ]]; then
    mkdir -p "${FOLDER%/*}"
    partial=$(mktemp -d "$FOLDER.XXXXXX")
    trap 'rm -rf "$partial"' EXIT
    "$PYTHON" -m pip install --quiet --quiet --no-deps --require-hashes --target "$partial" -r "$LOCK"
    # Whole or not at all; another process may have been faster.
    mv -T "$partial" "$FOLDER" 2>/dev/null || [[ -x $FOLDER/bin/uv ]]
fi
printf '%s\n' "$FOLDER/bin/uv"
