#!/usr/bin/env bash
# Installs torch, and torch only, into an environment that has its dependencies already (locks/train-*.txt).
#
#   tools/python/install-torch.sh PYTHON VERSION FLAVOR [FOLDER...]
#
# FLAVOR  cpu: the CPU build. cuda: the index's build with CUDA, and NVIDIA's libraries (locks/torch-cuda.txt).
#         gpu: what the base image brought; it is checked, never replaced.
# FOLDER  more places to look for a wheel of the CPU build, after those of pip's own configuration.
set -Eeuo pipefail

readonly PYTHON=$1 VERSION=$2 FLAVOR=$3
HERE=$(dirname "$(readlink -f "$0")")
readonly HERE

die() {
    printf 'install-torch: %s\n' "$1" >&2
    exit 3
}

# Prints torch's version and its CUDA's ("cpu" where it has none); read, not imported: that takes seconds, and its dependencies.
torch_reports() {
    "$PYTHON" -c '
import importlib.util, pathlib, runpy
torch = runpy.run_path(str(pathlib.Path(importlib.util.find_spec("torch").origin).with_name("version.py")))
print(torch["__version__"], torch["cuda"] or "cpu")' 2>/dev/null
}

is_cpu_build() {
    local version build
    read -r version build < <(torch_reports) && [[ ${version%%+*} == "$VERSION" && $build == cpu ]]
}

# A wheel with the version's local label "+cpu" can only be the CPU build.
install_from_folders() {
    local folder arguments uv
    while IFS= read -r folder; do
        compgen -G "$folder/torch-$VERSION+cpu-*.whl" >/dev/null || continue
        arguments=(--quiet --no-deps --no-index --find-links "$folder" "torch==$VERSION+cpu")
        # pip would do; uv unpacks it in half the time.
        uv=$("$HERE/find-uv.sh" "$PYTHON" 2>/dev/null) &&
            UV_LINK_MODE=copy "$uv" pip install --python "$PYTHON" --compile-bytecode "${arguments[@]}" 2>/dev/null && return
        "$PYTHON" -m pip install "${arguments[@]}" && return
    done < <("$HERE/pip-wheel-folders.sh" "$PYTHON"; printf '%s\n' "$@")
    return 1
}

# uv knows PyTorch's own indexes by name, so that none has to be written here.
install_with_uv() {
    local uv
    uv=$("$HERE/find-uv.sh" "$PYTHON") || return
    UV_SYSTEM_CERTS=1 "$uv" pip install --quiet --python "$PYTHON" --no-deps --compile-bytecode --torch-backend cpu "torch==$VERSION"
}

# On some platforms (and behind some mirrors) the index's plain torch is the CPU build; what it was is checked below.
install_with_pip() {
    "$PYTHON" -m pip install --quiet --no-deps "torch==$VERSION"
}

install_cpu() {
    is_cpu_build && return
    install_from_folders "$@" || install_with_uv || install_with_pip || die "no CPU build of torch; got no wheel of $VERSION from pip or PyTorch's index; put one into locks/wheels/ or configure pip's find-links"
    is_cpu_build || die "torch is not the CPU build of $VERSION; got $(torch_reports || echo none); put the wheel of the CPU build into locks/wheels/ or configure pip's find-links"
}

install_cuda() {
    # A wheel of the CPU build in one of pip's folders has the same version, and would come first.
    PIP_FIND_LINKS='' "$HERE/install-locked.sh" "$PYTHON" "$HERE/../../locks/torch-cuda.txt"
    [[ $(torch_reports) != *' cpu' ]] || die "torch is not the CUDA build of $VERSION; got $(torch_reports); configure pip with an index that has PyTorch's own wheels for Linux"
}

check_gpu() {
    local version build
    read -r version build < <(torch_reports) || die "the base image has no torch; got none; take NVIDIA's PyTorch image as BASE_IMAGE, or FLAVOR=cpu"
    [[ $build != cpu ]] || die "the base image's torch has no CUDA; got $version; take NVIDIA's PyTorch image as BASE_IMAGE, or FLAVOR=cpu"
}

case $FLAVOR in
cpu) install_cpu "${@:4}" ;;
cuda) install_cuda ;;
gpu) check_gpu ;;
*) die "FLAVOR is not cpu, cuda or gpu; got $FLAVOR; write one of them" ;;
esac
