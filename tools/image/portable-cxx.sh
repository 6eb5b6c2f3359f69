#!/usr/bin/env bash
# A C++ compiler for DeepSpeed's ops. DeepSpeed compiles them for the very CPU that it is built on; an image travels, so
# on x86-64 they are made for AVX2 instead, which every server of the last ten years has. Without debug symbols, which
# take a third of the time, and all with -O3 and OpenMP: files with the same options share the compiled header.
set -Eeuo pipefail

# PORTABLE_CXX_COMPILED  the folder for torch's headers, which take nine tenths of the time of a file: each file gets
#                        them first, compiled once for each set of options (default: as the file includes them)
readonly COMPILED=${PORTABLE_CXX_COMPILED:-}
INCLUDE=$(dirname "$(readlink -f "$0")")/include
readonly INCLUDE HEADER=$INCLUDE/torch/extension.h

arguments=(-O3 -fopenmp) source=''
[[ $(uname -m) != x86_64 ]] || arguments+=(-march=x86-64-v3)
shared=("${arguments[@]}") before=''
for argument in "$@"; do
    case $argument in
    -g | -O[0-9] | -fopenmp | -Wall | -Wno-reorder) continue ;;
    -march=native) [[ $(uname -m) != x86_64 ]] || continue ;;
    -D__AVX512__) [[ $(uname -m) != x86_64 ]] || argument=-D__AVX256__ ;;
    esac
    arguments+=("$argument")
    case $before:$argument in
    -o:* | -MF:*) ;;
    *.cpp) source=$argument ;;
    *:-c | *:-o | *:-MF | *:-MMD | *:-shared | *:-D__AVX* | *:-DTORCH_EXTENSION_NAME=*) ;;
    *) shared+=("$argument") ;;
    esac
    before=$argument
done

if [[ -n $source && -n $COMPILED ]]; then
    key=$(printf '%s\n' "${shared[@]}" | grep -v '^-I.*/csrc' | sort -u | sha256sum | cut -c1-16)
    folder=$COMPILED/$key
    mkdir -p "$folder"
    exec {lock}>"$folder/lock"
    flock "$lock"
    if [[ ! -e $folder/first.h ]]; then
        g++ "-I$INCLUDE" "${shared[@]}" -x c++-header "$HEADER" -o "$folder/first.h.gch"
        cp "$HEADER" "$folder/first.h"
    fi
    exec {lock}>&-
    arguments=(-include "$folder/first.h" "-I$INCLUDE" "${arguments[@]}")
fi
exec g++ "${arguments[@]}"
