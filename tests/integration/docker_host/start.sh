#!/usr/bin/env bash
# Starts sshd and dockerd, which starts again if it ends; the operator's public key comes in AUTHORIZED_KEY.
set -Eeuo pipefail

install -d -m 700 -o trainer -g trainer /home/trainer/.ssh
printf '%s\n' "$AUTHORIZED_KEY" >/home/trainer/.ssh/authorized_keys
chown trainer:trainer /home/trainer/.ssh/authorized_keys
ssh-keygen -A >/dev/null
/usr/sbin/sshd -E /var/log/sshd.log
while :; do
    dockerd --host unix:///var/run/docker.sock >>/var/log/dockerd.log 2>&1 || sleep 1
done
