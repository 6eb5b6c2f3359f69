#!/usr/bin/env bash
# Makes or updates .venv from the locks.
#
#   tools/venv.sh operator         what fabfile.py needs
#   tools/venv.sh extras           that, and what the extras data and report need
#   tools/venv.sh docs             what builds the documentation, beside what is there
#   tools/venv.sh remote           what reads data at https://, beside what is there
#   tools/venv.sh trackers         what sends runs to trackers and to people, in an environment of its own in .venv
#   tools/venv.sh full [cpu|gpu]   that, and torch's CPU or CUDA build, DeepSpeed, and what tests and checks need
#
# Without cpu or gpu, a .venv keeps the build of torch that it has; a new one gets the CPU build.
# PYTHON names the interpreter to take (default: the first of at least 3.11).
set -Eeuo pipefail
cd "$(dirname "$0")/.."

readonly LEVEL=$1
readonly VENV=.venv

fail() {
    printf '%s: %s\n' "venv" "$1" >&2
    exit "${2:-3}"
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
    # Fabric's own fab, with the exit codes, help and version of tridock.
    printf '#!/bin/sh\nexec "%s" -m tridock.cli.fab "$@"\n' "$PWD/$VENV/bin/python" >"$VENV/bin/fab"
    chmod +x "$VENV/bin/tridock" "$VENV/bin/fab"
}

flavor_here() {
    if [[ -e $VENV/.gpu ]]; then echo gpu; else echo cpu; fi
}

# The CUDA build brings 5 GB of libraries along, and DeepSpeed is built against one torch: nothing of it may stay.
remove_other_flavor() {
    [[ -e $VENV/.full && $(flavor_here) != "$1" ]] || return 0
    printf "venv: rebuilding .venv, because it has torch's %s build\n" "$(flavor_here)"
    rm -rf "$VENV"
}

make_environment() {
    local python
    ! is_recent "$VENV/bin/python" || return 0
    python=$(find_python)
    require_venv_module "$python"
    "$python" -m venv "$VENV"
}

install_lock() {
    make_environment
    printf 'venv: installing %s\n' "$2"
    tools/python/install-locked.sh "$VENV/bin/python" "locks/$1.txt"
}

install_full() {
    local flavor=$1 torch=cpu
    [[ $flavor == cpu || $flavor == gpu ]] || fail "FLAVOR is neither cpu nor gpu; got $flavor; write FLAVOR=gpu for torch's CUDA build, or leave it out" 2
    [[ $flavor == cpu ]] || torch=cuda
    remove_other_flavor "$flavor"
    make_environment
    printf "venv: installing everything (torch's %s build is the largest part)\n" "${torch^^}"
    tools/python/install-locked.sh "$VENV/bin/python" locks/extras.txt "locks/train-$flavor.txt" locks/dev.txt
    tools/python/install-torch.sh "$VENV/bin/python" "$(sed -n 's/^torch==//p' locks/torch.txt)" "$torch" locks/wheels
    tools/python/install-deepspeed.sh "$VENV/bin/python"
    touch "$VENV/.extras" "$VENV/.full" "$VENV/.$flavor"
}

case $LEVEL in
operator) install_lock operator "what fab needs" ;;
extras)
    install_lock extras "what fab, data sets and reports need"
    touch "$VENV/.extras"
    ;;
docs)
    install_lock docs "what builds the documentation"
    touch "$VENV/.docs"
    exit
    ;;
remote)
    install_lock remote "what reads data at https://"
    touch "$VENV/.remote"
    exit
    ;;
trackers)
    make_environment
    "$VENV/bin/python" -m venv "$VENV/trackers"
    printf 'venv: installing the libraries of trackers and notifications\n'
    tools/python/install-locked.sh "$VENV/trackers/bin/python" locks/trackers.txt
    touch "$VENV/.trackers"
    exit
    ;;
full) install_full "${2:-$(flavor_here)}" ;;
esac
add_this_repository
touch "$VENV/.operator"
