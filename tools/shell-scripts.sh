#!/usr/bin/env bash
# Prints every shell script of the repository, one a line: those with a shell's first line, and those that others source.
set -Eeuo pipefail
cd "$(dirname "$0")/.."

git ls-files --cached --others --exclude-standard | while IFS= read -r file; do
    [[ -f $file ]] || continue
    # Without a process for each file; of a binary file some bytes are enough.
    IFS= read -r -n 200 first <"$file" || true
    [[ ! $first =~ ^(\#!.*[/\ ](ba)?sh(\ -p)?$|\#\ shellcheck\ shell=) ]] || printf '%s\n' "$file"
done
