#!/usr/bin/env bash
# A node is healthy when its sshd has greeted on its port since it was started, and still listens there; any other
# container as long as it runs.
#
# Not a greeting every time: each leaves two lines in sshd's log, and soon there would be nothing else in it.
set -Eeuo pipefail

readonly STATE=${TRIDOCK_STATE:-/run/tridock/state}

is_node() {
    # The first process says what the container is for from its first moment on.
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
# "greeted" is removed at every start of the container, with the rest of what its last life left.
if [[ ! -e $STATE/greeted ]]; then
    greets "$(setting ListenAddress)" "$port" 2>/dev/null
    : >"$STATE/greeted"
fi
[[ -n $(ss --listening --tcp --numeric --no-header "sport = :$port") ]] || unhealthy "nothing listens on port $port any more"
