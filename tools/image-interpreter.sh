#!/usr/bin/env bash
# Copies this system's Python into FOLDER, with its libraries and loader, so that it runs on any glibc from there.
#
#   tools/image-interpreter.sh FOLDER
set -Eeuo pipefail

readonly TO=$1
version=$(python3 -c 'import sys; print("%d.%d" % sys.version_info[:2])')
mkdir -p "$TO/bin" "$TO/lib"
cp "/usr/bin/python$version" "$TO/bin/python3"
cp -r "/usr/lib/python$version" "$TO/lib/"
loader=$(patchelf --print-interpreter "$TO/bin/python3")
cp -L "$loader" "$TO/lib/"

# Every library that the interpreter or one of its modules needs.
mapfile -t modules < <(find "$TO/lib/python$version/lib-dynload" -name '*.so')
while IFS= read -r library; do
    cp -Ln "$library" "$TO/lib/"
done < <(ldd "$TO/bin/python3" "${modules[@]}" | awk '$2 == "=>" && $3 ~ /^\// { print $3 }' | sort -u)

patchelf --set-interpreter "$TO/lib/${loader##*/}" --set-rpath "$TO/lib" "$TO/bin/python3"
for file in "${modules[@]}" "$TO"/lib/*.so*; do
    [[ $file == */"${loader##*/}" || $file == */libc.so.* ]] || patchelf --set-rpath "$TO/lib" "$file"
done
find "$TO" -depth -name __pycache__ -exec rm -r {} +
# The distribution's own hook is of no use elsewhere.
rm -f "$TO/lib/python$version/sitecustomize.py"
"$TO/bin/python3" -I -c 'import ctypes, hashlib, json, select, socket, sqlite3, ssl, subprocess, tarfile, zlib'
