#!/usr/bin/env bash
# Installs what locks name, and nothing else, into an environment.
#
#   tools/python/install-locked.sh PYTHON LOCK...
#
# uv does it, in a quarter of pip's time. It knows nothing of pip's configuration, though: where that says how an index is
# to be reached (a company's mirror, a proxy), pip does it.
set -Eeuo pipefail

readonly PYTHON=$1
HERE=$(dirname "$(readlink -f "$0")")
readonly HERE

requirements=()
for lock in "${@:2}"; do
    requirements+=(-r "$lock")
done

pip_is_configured() {
    "$PYTHON" -m pip config list 2>/dev/null | grep -qE '^[^=]*\.(index-url|no-index|proxy|trusted-host|client-cert)='
}

install_with_uv() {
    local uv
    ! pip_is_configured || return 1
    uv=$("$HERE/find-uv.sh" "$PYTHON" 2>/dev/null) || return
    UV_SYSTEM_CERTS=1 UV_LINK_MODE=copy "$uv" pip install --quiet --python "$PYTHON" --no-deps --require-hashes --compile-bytecode "${requirements[@]}"
}

install_with_pip() {
    "$PYTHON" -m pip install --quiet --quiet --disable-pip-version-check --no-deps --require-hashes "${requirements[@]}"
}

install_with_uv || install_with_pip
