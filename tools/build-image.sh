#!/usr/bin/env bash
# Builds the image (make image, tridock image). Prints little on standard output: the image's name comes last.
#
#   tools/build-image.sh cpu|gpu [BASE_IMAGE [IMAGE [CA_FILE [MEGATRON [FOLDER]]]]]
#   tools/build-image.sh wrap BASE_IMAGE IMAGE [CA_FILE]
#
# wrap        Tridock's layer on an image with the user's own environment (Dockerfile.wrap)
# BASE_IMAGE  auto: the one for this machine's GPUs; without GPUs, the newest
# MEGATRON    as tools/megatron-source.sh has it
# FOLDER      whose docker compose uses the image from now on, if it has Tridock's Compose files
# TRACKERS=yes in the environment: with the libraries of trackers and notifications (docs/trackers.md)
# An argument that is empty has the flavor's default. KEEP_COMPOSE=1: docker compose keeps its current image.
# LABELS has a line NAME=VALUE for each further label of the image.
set -Eeuo pipefail
cd "$(dirname "$0")/.."

ENGINE=$(printf '%q' "$PWD/tools/docker-engine.sh")

readonly ENGINE STANDABLE=debian:bookworm-slim
if [[ $1 == wrap ]]; then
    defaults=('' '' '')
elif [[ $1 == cpu ]]; then
    defaults=("$STANDABLE" tridock:cpu auto)
else
    defaults=(auto tridock:latest https://github.com/deepspeedai/DeepSpeedExamples.git)
fi
BASE_IMAGE=${2:-${defaults[0]}}
readonly FLAVOR=$1 IMAGE=${3:-${defaults[1]}} CA=${4:-} MEGATRON=${5:-${defaults[2]}} FOLDER=${6:-$PWD}

fail() {
    printf '%s\n' "$2" >&2
    exit "$1"
}

check_request() {
    [[ $FLAVOR == cpu || $FLAVOR == gpu || $FLAVOR == wrap ]] || fail 2 "FLAVOR: neither cpu nor gpu; got $FLAVOR; write FLAVOR=cpu for the twin's image, or leave it out"
    [[ -z $CA || -r $CA ]] || fail 2 "CA: no such file, or it cannot be read; got $CA; name a file of PEM certificates"
    command -v docker >/dev/null || fail 3 "docker: no such command; install Docker, or run $ENGINE as root on Debian"
    docker info >/dev/null 2>&1 || fail 3 "docker: no engine answers; got $(docker info 2>&1 | grep -iE 'cannot|permission|error' | head -n 1); start it, or run $ENGINE as root on Debian"
    # The client of Docker 20.10 brings BuildKit's front end along; later ones have it as a plugin.
    docker buildx version >/dev/null 2>&1 || [[ $(docker version --format '{{.Client.Version}}') == 20.* ]] ||
        fail 3 "docker: BuildKit's plugin is missing; got $(docker buildx version 2>&1 | head -n 1); install docker-buildx, or run $ENGINE as root on Debian"
}

choose_base() {
    [[ $BASE_IMAGE == auto ]] || return 0
    BASE_IMAGE=$(python3 tridock/base_images.py) || fail 3 "python3: does not name the base image; install Python 3.8 or newer, or name the base image (BASE_IMAGE, or --base-image)"
    printf 'base image: %s (docs/gpus.md has the GPUs and drivers of each; tridock check compares them with the hosts)\n' "$BASE_IMAGE"
}

# The base from here, from a registry, or (Debian's, which can be made anywhere from packages) as a stand-in.
find_base() {
    local base=$1 complaint
    if [[ $base == "$STANDABLE" ]]; then
        tools/base-image.sh "$base"
    elif ! docker image inspect "$base" >/dev/null 2>&1; then
        complaint=$(docker pull --quiet "$base" 2>&1) ||
            fail 3 "$base: the base image cannot be pulled; got ${complaint##*$'\n'}; log in to its registry, or name another (BASE_IMAGE, or --base-image)"
    fi
}

# What the layer is made of has to be installed in it, and what it brings has to start there.
check_wrappable() {
    local missing
    missing=$(docker run --rm --user 0 --network none --entrypoint sh "$BASE_IMAGE" -c \
        'for name in apt-get bash setpriv getent; do command -v "$name" >/dev/null || echo "$name"; done' 2>/dev/null) || missing="sh"
    [[ -z $missing ]] || fail 3 "$BASE_IMAGE: cannot be wrapped; got no ${missing//$'\n'/, no }; use an image on Debian or Ubuntu"
}

# A container does not see the folders in which pip finds wheels on this machine; the one wheel that matters goes along.
collect_wheels() {
    local version folder wheel
    [[ $FLAVOR == cpu ]] || return 0
    version=$(sed -n 's/^torch==//p' locks/torch.txt)
    while IFS= read -r folder; do
        for wheel in "$folder/torch-$version+cpu-"*.whl; do
            [[ ! -e $wheel || -e locks/wheels/${wheel##*/} ]] || cp -p "$wheel" locks/wheels/
        done
    done < <(tools/python/pip-wheel-folders.sh)
}

git_commit() {
    local commit
    # Of this folder, and not of one around it.
    if [[ ! -e .git ]] || ! commit=$(git rev-parse HEAD 2>/dev/null); then
        echo unknown
        return
    fi
    # What the image holds, and so what "dirty" is about.
    [[ -z $(git status --porcelain -- Dockerfile tridock entrypoint configs locks patches tools 2>/dev/null) ]] || commit+=-dirty
    printf '%s\n' "$commit"
}

# Where the source can be had, without anybody's password; a clone of a folder has no such place.
source_url() {
    local url=
    [[ ! -e .git ]] || url=$(git config --get remote.origin.url 2>/dev/null | sed 's,//[^/@]*@,//,') || true
    [[ $url == http*://* || $url == git@* ]] || url=unknown
    printf '%s\n' "$url"
}

build() {
    local options=("$@") name
    for name in http_proxy https_proxy no_proxy HTTP_PROXY HTTPS_PROXY NO_PROXY; do
        [[ -z ${!name:-} ]] || options+=(--build-arg "$name")
    done
    [[ -z ${TRACKERS:-} ]] || options+=(--build-arg "TRACKERS=$TRACKERS")
    [[ -z $CA ]] || options+=(--secret "id=ca,src=$CA")
    while IFS= read -r name; do
        [[ -z $name ]] || options+=(--label "$name")
    done <<<"${LABELS:-}"
    # An engine older than 23 builds with BuildKit only when asked.
    DOCKER_BUILDKIT=1 docker build "${options[@]}" \
        --build-arg "BASE_IMAGE=$BASE_IMAGE" --build-arg "FLAVOR=$FLAVOR" --build-arg "GIT_COMMIT=$(git_commit)" \
        --build-arg "SOURCE=$(source_url)" --build-arg "VERSION=$(sed -n 's/^__version__ = "\(.*\)"/\1/p' tridock/__init__.py)" --tag "$IMAGE" .
}

main() {
    check_request
    mkdir -p upstream locks/wheels
    choose_base
    find_base "$BASE_IMAGE"
    if [[ $FLAVOR == wrap ]]; then
        check_wrappable
        find_base "$STANDABLE"
        build --file Dockerfile.wrap
        printf '%s\n' "$IMAGE"
        return
    fi
    collect_wheels
    tools/megatron-source.sh "$MEGATRON"
    build
    [[ -n ${KEEP_COMPOSE:-} || ! -e $FOLDER/docker-compose.gpu.yml ]] || tools/compose-env.sh "$FLAVOR" "$IMAGE" "$FOLDER"
    printf '%s\n' "$IMAGE"
}

main
