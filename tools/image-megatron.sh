#!/usr/bin/env bash
# Puts the patched source of Megatron-LM v1.1.5 into the image; an empty folder where the build was given none.
#
#   tools/image-megatron.sh SOURCE PATCHES TARGET
set -Eeuo pipefail

PATCHES=$(readlink -f "$2")
readonly SOURCE=$1 PATCHES TARGET=$3

mkdir -p "$TARGET"
# Within a repository git apply skips what lies outside of its index, and says nothing.
GIT_CEILING_DIRECTORIES=$(dirname "$(readlink -f "$TARGET")")
export GIT_CEILING_DIRECTORIES
[[ -f $SOURCE/pretrain_gpt2.py ]] || exit 0
for part in pretrain_gpt2.py LICENSE megatron tools; do
    cp -r "$SOURCE/$part" "$TARGET/"
done
names=()
for patch in "$PATCHES"/*.patch; do
    name=${patch##*/}
    # A folder that was patched before, as the one of another image.
    if ! git -C "$TARGET" apply --reverse --check "$patch" 2>/dev/null; then
        git -C "$TARGET" apply --verbose "$patch" || {
            printf 'MEGATRON: %s does not apply; the source is not commit e7c8cb767acd of DeepSpeedExamples, or was changed\n' "$name" >&2
            exit 3
        }
    fi
    names+=("\"${name%.patch}\"")
done
patches=$(IFS=,; printf '%s' "${names[*]}")
printf '{"source": "%s", "patches": [%s]}\n' "$(cat "$SOURCE/tridock-source" 2>/dev/null || echo unknown)" "$patches" >"$TARGET/tridock-source.json"
chmod -R a+rX "$TARGET" # a source that was fetched under umask 077 is its owner's alone
