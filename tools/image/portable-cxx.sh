#!/usr/bin/env bash
# A C++ compiler for DeepSpeed's ops. DeepSpeed compiles them for the very CPU that it is built on; an image travels, so
# on x86-64 they are made for AVX2 instead, which every server of the last ten years has. Debug symbols are left out: they take a third of the time.
set -Eeuo pipefail

# PORTABLE_CXX_FIRST  arguments to put in front of all others
read -r -a arguments <<<"${PORTABLE_CXX_FIRST:-}"
for argument in "$@"; do
    [[ $argument != -g ]] || continue
    if [[ $(uname -m) == x86_64 ]]; then
        case $argument in
        -march=native) argument=-march=x86-64-v3 ;;
        -D__AVX512__) argument=-D__AVX256__ ;;
        esac
    fi
    arguments+=("$argument")
done
exec g++ "${arguments[@]}"
