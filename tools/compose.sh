#!/usr/bin/env bash
# Runs docker compose where this machine has that plugin. Without arguments, it only looks for it.
#
#   tools/compose.sh [ARGUMENT...]
set -Eeuo pipefail

if ! complaint=$(docker compose version 2>&1 >/dev/null); then
    ENGINE=$(printf '%q' "$(cd "$(dirname "$0")" && pwd)/docker-engine.sh")
    printf '%s\n' "docker compose: the Compose plugin is missing on this machine; got $(head -n 1 <<<"$complaint"); install docker-compose-plugin (Debian and Ubuntu with Docker's packages) or docker-compose-v2 (Ubuntu's own), or run $ENGINE as root on Debian" >&2
    exit 3
fi
[[ $# -eq 0 ]] || exec docker compose "$@"
