#!/usr/bin/env bash
# Prints every shell script of the repository, one a line: those with a shell's first line, and those that others source.
set -Eeuo pipefail
cd "$(dirname "$0")/.."

git ls-files --cached --others --exclude-standard | while IFS= read -r file; do
    [[ -f $file ]] || continue
    first=$(head -n 1 "$file" | tr -d '\0')
    [[ ! $first =~ ^(\#!.*[/\ ](ba)?sh$|\#\ shellcheck\ shell=) ]] || printf '%s\n' "$file"
done
