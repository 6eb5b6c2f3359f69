#!/usr/bin/env bash
# Makes `docker`, `docker compose` and `docker buildx` work on Debian or Ubuntu, as root; does nothing where they do.
#
#   tools/docker-engine.sh
#
# For CI and for fresh machines. Where systemd does not run (in a container, on a build machine) dockerd is started by itself
# and keeps running after this script has ended.
set -Eeuo pipefail

readonly LOG=/var/log/dockerd.log
readonly PLUGINS=/usr/local/lib/docker/cli-plugins
# Debian 12 has neither plugin; those of Debian 13 are static programs, which run there as well.
readonly NEXT_SUITE=trixie

fail() {
    printf 'docker-engine: %s\n' "$1" >&2
    exit 3
}

require_root_and_apt() {
    [[ $(id -u) == 0 ]] || fail "installing and starting Docker needs root; got uid $(id -u); run it with sudo"
    command -v apt-get >/dev/null || fail "apt-get is needed; got none; install Docker Engine as its manual says for this system"
}

engine_answers() {
    docker info >/dev/null 2>&1
}

install_packages() {
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get -o DPkg::Lock::Timeout=300 install -y -qq --no-install-recommends "$@" >/dev/null
}

dockerd_runs() {
    local pid
    pid=$(cat /var/run/docker.pid 2>/dev/null) && [[ $(cat "/proc/$pid/comm" 2>/dev/null) == dockerd ]]
}

start_engine() {
    local waited
    if [[ -d /run/systemd/system ]]; then
        systemctl start docker
    else
        if ! dockerd_runs; then
            # The pid files of one that is gone (a restored or copied machine) would stop the new one.
            rm -f /var/run/docker.pid /run/docker/containerd/containerd.pid
            setsid nohup dockerd >>"$LOG" 2>&1 </dev/null &
        fi
    fi
    for ((waited = 0; waited < 120; waited++)); do
        ! engine_answers || return 0
        sleep 0.5
    done
    tail -n 20 "$LOG" >&2 || true
    fail "the engine does not answer after 60 s; its last output is above; see $LOG"
}

# Whether the machine's own packages have a program of at least this version ("docker-compose" was Python up to 1).
offers() {
    local candidate
    candidate=$(apt-cache policy "$1" 2>/dev/null | awk '$1 == "Candidate:" { print $2 }')
    [[ -n $candidate && $candidate != "(none)" ]] && dpkg --compare-versions "$candidate" ge "$2"
}

# Takes one package's plugin from the next Debian release: from the machine's own archive, with lists and settings of its own,
# so that apt on this machine never hears of that release.
plugin_of_next_suite() {
    local package=$1 plugin=$2 folder archive
    # shellcheck disable=SC2016 # apt expands these, not the shell
    archive=$(apt-get indextargets --format '$(REPO_URI) $(RELEASE)' 'Created-By: Packages' |
        awk '$2 ~ /^[a-z]+$/ { print $1; exit }')
    [[ -n $archive ]] || fail "no Debian archive among apt's sources; got none; install the package $package by hand"
    folder=$(mktemp -d)
    mkdir -p "$folder"/{lists/partial,cache/archives/partial}
    printf 'deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] %s %s main\n' "$archive" "$NEXT_SUITE" >"$folder/sources.list"
    local apt=(apt-get -qq -o "Dir::Etc::SourceList=$folder/sources.list" -o Dir::Etc::SourceParts=- -o "Dir::State::Lists=$folder/lists"
        -o "Dir::Cache=$folder/cache" -o APT::Sandbox::User=root -o Acquire::Languages=none)
    "${apt[@]}" update
    (cd "$folder" && "${apt[@]}" download "$package")
    dpkg -x "$folder/$package"_*.deb "$folder/files"
    install -D -m 755 "$folder/files/usr/libexec/docker/cli-plugins/$plugin" "$PLUGINS/$plugin"
    rm -rf "$folder"
}

ensure_plugin() {
    local name=$1 version=$2 package
    ! docker "$name" version >/dev/null 2>&1 || return 0
    require_root_and_apt
    for package in "docker-$name-v2" "docker-$name"; do
        if offers "$package" "$version"; then
            install_packages "$package"
            return
        fi
    done
    plugin_of_next_suite "docker-$name" "docker-$name"
    docker "$name" version >/dev/null || fail "docker $name does not run; got the error above; install its plugin by hand"
}

main() {
    if ! engine_answers; then
        require_root_and_apt
        command -v dockerd >/dev/null || install_packages docker.io iptables
        start_engine
    fi
    ensure_plugin compose 2
    ensure_plugin buildx 0.10
}

main
