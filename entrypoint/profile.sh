# shellcheck shell=sh
# Read by login shells (/etc/profile.d), because /etc/profile replaces the container's PATH with the distribution's.
if [ -r "${TRIDOCK_STATE:-/run/tridock/state}/environment.sh" ]; then
    # shellcheck source=/dev/null
    . "${TRIDOCK_STATE:-/run/tridock/state}/environment.sh"
fi
