#!/usr/bin/env bash
# Starts munge and sshd, and then, as `controller` or `node`, Slurm's part of this machine.
set -Eeuo pipefail

install -d -m 755 -o munge -g munge /run/munge
runuser -u munge -- /usr/sbin/munged
install -d -m 755 /run/sshd
/usr/sbin/sshd
mkdir -p /var/lib/slurm/controller /var/lib/slurm/node
case $1 in
controller) exec slurmctld -D ;;
node) exec slurmd -D ;;
*)
    echo "start.sh: must be controller or node; got $1" >&2
    exit 2
    ;;
esac
