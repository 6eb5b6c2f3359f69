#!/usr/bin/env bash
# A node is healthy when its sshd greets on its port; any other container as long as it runs.
set -Eeuo pipefail

readonly STATE=${TRIDOCK_STATE:-/run/tridock/state}
[[ -e $STATE/sshd_config ]] || exit 0

port=$(awk '$1 == "Port" { print $2; exit }' "$STATE/sshd_config")
address=$(awk '$1 == "ListenAddress" { print $2; exit }' "$STATE/sshd_config")
case $address in
0.0.0.0) address=127.0.0.1 ;;
::) address=::1 ;;
esac

exec 3<>"/dev/tcp/$address/$port"
IFS= read -r -t 4 banner <&3
[[ $banner == SSH-2.0-* ]] || { printf 'port %s of %s is not an ssh server; got %q\n' "$port" "$address" "$banner"; exit 1; }
