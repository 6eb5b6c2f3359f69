# shellcheck shell=sh
# Read by login shells (/etc/profile.d): /etc/profile has just put the distribution's PATH in place of the container's.
if [ -r "${TRIDOCK_STATE:-/run/tridock/state}/environment.sh" ]; then
    # shellcheck source=/dev/null
    . "${TRIDOCK_STATE:-/run/tridock/state}/environment.sh"
fi
