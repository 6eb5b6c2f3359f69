#!/usr/bin/env bash
# A C++ compiler for DeepSpeed's ops. DeepSpeed compiles them for the very CPU that it is built on; an image travels, so
# on x86-64 they are made for AVX2 instead, which every server of the last ten years has. Debug symbols are left out: they take a third of the time.
set -Eeuo pipefail

# PORTABLE_CXX_FIRST  words to put in front of all others
read -r -a words <<<"${PORTABLE_CXX_FIRST:-}"
for word in "$@"; do
    [[ $word != -g ]] || continue
    if [[ $(uname -m) == x86_64 ]]; then
        case $word in
        -march=native) word=-march=x86-64-v3 ;;
        -D__AVX512__) word=-D__AVX256__ ;;
        esac
    fi
    words+=("$word")
done
exec g++ "${words[@]}"
