#!/usr/bin/env bash
# Brings the source of Megatron-LM v1.1.5 (DeepSpeedExamples) into upstream/, where the image's build takes it from.
#
#   tools/megatron-source.sh WHERE
#
# WHERE is a git repository's URL or folder (a mirror for closed networks), a folder that holds pretrain_gpt2.py,
# auto (what was brought before, else upstream's repository; without an answer the image is built without the engine),
# or none.
set -Eeuo pipefail
cd "$(dirname "$0")/.."

readonly WHERE=$1
readonly UPSTREAM=https://github.com/deepspeedai/DeepSpeedExamples.git
# The last commit that holds the folder; later ones have removed it.
readonly COMMIT=e7c8cb767acddba8ad5d2c41fe18e30de7870d30
readonly FOLDER=megatron/Megatron-LM-v1.1.5-3D_parallelism
readonly TARGET=upstream/megatron-v1.1.5
scratch=

fail() {
    printf 'MEGATRON: %s; got %s; %s\n' "$1" "$2" "$3" >&2
    exit 3
}

here_already() {
    [[ -f $TARGET/pretrain_gpt2.py && $(cat "$TARGET/tridock-source" 2>/dev/null) == "$COMMIT" ]]
}

# A source that the user named is kept until another is named.
brought_before() {
    [[ -s $TARGET/tridock-source ]] || return
    printf 'Megatron-LM v1.1.5: from %s, as named before (MEGATRON, or --megatron: none leaves it out)\n' "$(<"$TARGET/tridock-source")"
}

# One commit, and of it one folder: a few megabytes instead of the repository's hundreds.
fetch() {
    local repository=$1 store=$scratch/git
    git init --quiet "$store"
    git -C "$store" remote add origin "$repository"
    # A server that has stopped talking must not hold the build up.
    git -C "$store" config http.lowSpeedLimit 1000
    git -C "$store" config http.lowSpeedTime 20
    {
        GIT_TERMINAL_PROMPT=0 timeout 300 git -C "$store" fetch --quiet --depth 1 --filter=blob:none origin "$COMMIT" &&
            git -C "$store" sparse-checkout set "$FOLDER" &&
            GIT_TERMINAL_PROMPT=0 timeout 300 git -C "$store" -c advice.detachedHead=false checkout --quiet "$COMMIT"
    } 2>"$scratch/complaint" || return 1
    mv "$store/$FOLDER" "$scratch/source"
}

# A mirror on this machine may be bare and shallow: read where it lies.
from_local_repository() {
    git -C "$WHERE" cat-file -e "$COMMIT^{commit}" 2>"$scratch/complaint" || return 1
    mkdir "$scratch/source"
    git -C "$WHERE" archive "$COMMIT" "$FOLDER" 2>"$scratch/complaint" |
        tar -x -C "$scratch/source" --strip-components=2
}

complaint() {
    grep -v '^$' "$scratch/complaint" | tail -n 1
}

keep() {
    local source=$1 origin=$2
    rm -rf "$TARGET"
    cp -r "$source" "$TARGET"
    printf '%s\n' "$origin" >"$TARGET/tridock-source"
}

main() {
    scratch=$(mktemp -d)
    trap 'rm -rf "$scratch"' EXIT
    case $WHERE in
    none)
        rm -rf "$TARGET"
        ;;
    auto)
        here_already && return
        brought_before && return
        rm -rf "$TARGET"
        if ! fetch "$UPSTREAM"; then
            printf 'the image will lack engine megatron-deepspeed: its source cannot be fetched (%s); name another with MEGATRON, or --megatron\n' "$(complaint)"
            return
        fi
        keep "$scratch/source" "$COMMIT"
        ;;
    *)
        if [[ -f $WHERE/pretrain_gpt2.py ]]; then
            keep "$WHERE" "a folder"
        elif [[ -d $WHERE ]]; then
            from_local_repository || fail "holds neither pretrain_gpt2.py nor commit $COMMIT" "$WHERE" \
                "name that folder, or a repository that has the commit, or write none"
            keep "$scratch/source" "$COMMIT"
        else
            here_already && return
            [[ $WHERE != "$UPSTREAM" ]] || ! brought_before || return 0
            fetch "$WHERE" || fail "cannot be fetched ($(complaint))" "$WHERE" \
                "name a mirror or a folder (MEGATRON, or --megatron), or write none for an image without this engine"
            keep "$scratch/source" "$COMMIT"
        fi
        ;;
    esac
}

main
