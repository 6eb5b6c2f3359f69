#!/bin/bash -p
# A node is healthy if its sshd has sent its banner since the container started, and still listens. Any other container
# is healthy while it runs.
#
# The banner is read only once, because each connection adds two lines to sshd's log.
set -Eeuo pipefail

readonly STATE=${TRIDOCK_STATE:-/run/tridock/state}

is_node() {
    # The command line of the first process tells what the container is for.
    [[ $(tr '\0' ' ' </proc/1/cmdline) == *"/entrypoint.sh node " ]]
}

setting() {
    awk -v name="$1" '$1 == name { print $2; exit }' "$STATE/sshd_config"
}

unhealthy() {
    printf '%s\n' "$1"
    exit 1
}

greets() {
    local address=$1 port=$2 banner=
    case $address in
    0.0.0.0) address=127.0.0.1 ;;
    ::) address=::1 ;;
    esac
    exec 3<>"/dev/tcp/$address/$port" || unhealthy "nothing listens on $address port $port"
    IFS= read -r -t 4 banner <&3 || true
    [[ $banner == SSH-2.0-* ]] || unhealthy "$address port $port is not an ssh server; got '$banner'"
}

is_node || exit 0
[[ -s $STATE/sshd_config ]] || unhealthy "sshd has not been started"
port=$(setting Port)
# Every start of the container removes "greeted", with the other files of its previous start.
if [[ ! -e $STATE/greeted ]]; then
    greets "$(setting ListenAddress)" "$port" 2>/dev/null
    : >"$STATE/greeted"
fi
[[ -n $(ss --listening --tcp --numeric --no-header "sport = :$port") ]] || unhealthy "nothing listens on port $port any more"
