#!/usr/bin/env bash
# Makes or updates .venv from the locks.
#
#   tools/venv.sh operator    what fabfile.py needs
#   tools/venv.sh full        that, and torch's CPU build, DeepSpeed, and what tests and checks need
#
# PYTHON names the interpreter to take (default: the first of at least 3.11).
set -Eeuo pipefail
cd "$(dirname "$0")/.."

readonly LEVEL=$1
readonly VENV=.venv

fail() {
    printf '%s: %s\n' "venv" "$1" >&2
    exit 3
}

is_recent() {
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null
}

find_python() {
    local candidate
    for candidate in ${PYTHON:-python3 python3.13 python3.12 python3.11}; do
        ! is_recent "$candidate" || { printf '%s\n' "$candidate"; return; }
    done
    fail "Python 3.11 or later is needed; got $(python3 --version 2>/dev/null || echo none); install it, or name one with PYTHON=..."
}

# Debian and Ubuntu keep a part of the venv module in a package of its own.
require_venv_module() {
    local python=$1
    ! "$python" -c 'import ensurepip' 2>/dev/null || return 0
    if [[ $(id -u) == 0 ]] && command -v apt-get >/dev/null; then
        apt-get update -qq
        DEBIAN_FRONTEND=noninteractive apt-get -o DPkg::Lock::Timeout=300 install -y -qq --no-install-recommends python3-venv >/dev/null
    fi
    "$python" -c 'import ensurepip' 2>/dev/null || fail "$python has no venv module; got an ImportError for ensurepip; install the package python3-venv"
}

# What an editable installation comes to, without the build tools that pip would fetch for it.
add_this_repository() {
    local packages
    packages=$("$VENV/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    printf '%s\n' "$PWD" >"$packages/tridock.pth"
    printf '#!/bin/sh\nexec "%s" -m tridock.cli "$@"\n' "$PWD/$VENV/bin/python" >"$VENV/bin/tridock"
    chmod +x "$VENV/bin/tridock"
}

main() {
    local python locks=(locks/operator.txt)
    if ! is_recent "$VENV/bin/python"; then
        python=$(find_python)
        require_venv_module "$python"
        "$python" -m venv "$VENV"
    fi
    if [[ $LEVEL == full ]]; then
        locks+=(locks/train-cpu.txt locks/dev.txt)
        printf 'venv: installing everything (torch'"'"'s CPU build is the largest part)\n'
    else
        printf 'venv: installing what fab needs\n'
    fi
    tools/python/install-locked.sh "$VENV/bin/python" "${locks[@]}"
    if [[ $LEVEL == full ]]; then
        tools/python/install-torch.sh "$VENV/bin/python" "$(sed -n 's/^torch==//p' locks/torch.txt)" cpu locks/wheels
        tools/python/install-deepspeed.sh "$VENV/bin/python"
    fi
    add_this_repository
    touch "$VENV/.operator"
    [[ $LEVEL != full ]] || touch "$VENV/.full"
}

main
