#!/bin/bash -p
# The first program in every container of the image.
#
#   node        sshd in the foreground, as the operator's user: one node of a cluster
#   COMMAND...  runs any other command as the operator's user
#
# Started as root, it drops to the operator's uid and gid. Started with --user, it keeps that user.
# bash -p: without BASH_ENV, whose file is of the container's previous start.
set -Eeuo pipefail

readonly STATE=${TRIDOCK_STATE:-/run/tridock/state}
readonly SECRETS=${TRIDOCK_SECRETS:-/run/tridock/secrets}
readonly ACCOUNT=tridock
readonly ACCOUNT_HOME=/home/tridock
readonly QUOTED_QUOTE="'\\''"
OWN=$(dirname "${BASH_SOURCE[0]}")
readonly OWN EXIT_REQUEST=2 EXIT_CLUSTER=3

# Prints an error as "where: what; got value; todo" and exits. A node also prints its fields as JSON on stdout, for tridock up.
fail() {
    local status=$1 what=$2 got=$3 todo=$4 where=${TRIDOCK_NODE:-$(hostname)}
    printf '%s: %s; %s%s\n' "$where" "$what" "${got:+got $got; }" "$todo" >&2
    [[ ${COMMAND:-} != node ]] ||
        "$OWN/tridock-python" -c 'import json, sys; print(json.dumps(dict(zip(("where", "what", "got", "todo"), sys.argv[1:]))))' \
            "$where" "$what" "$got" "$todo"
    exit "$status"
}

# Reports a command that failed without a message; fail() prints its own.
name_failed_step() {
    local status=$? line=$1
    [[ $status == "$EXIT_REQUEST" || $status == "$EXIT_CLUSTER" ]] || printf 'entrypoint.sh: line %s failed: %s (exit %s)\n' "$line" "$BASH_COMMAND" "$status" >&2
}
trap 'name_failed_step $LINENO' ERR

# Joins the lines of another program's message into one.
one_line() {
    tr -d '\r' <<<"$1" | paste -s -d '|' | sed 's/|/ | /g'
}

# ---- who runs here ---------------------------------------------------------------------------------------------------

is_id() {
    [[ $1 =~ ^(0|[1-9][0-9]{0,9})$ ]]
}

# Prints the uid or gid to use: TRIDOCK_UID or TRIDOCK_GID if set, otherwise that of the owner of /workspace.
operator_id() {
    local name=$1 format=$2 id
    id=${!name:-$(stat --format "$format" /workspace)}
    is_id "$id" || fail "$EXIT_REQUEST" "$name is not a number" "$id" "set it to what 'id' prints on the operator's machine, or leave it out"
    printf '%s\n' "$id"
}

# Prints a passwd or group file that contains the account's line once. It is the first line, so that the id resolves to
# this name even if the base image has another one (uid 1000 is "ubuntu" on NVIDIA's). Root stays root.
with_account() {
    local file=$1 line=$2 id=$3
    [[ $id == 0 ]] || printf '%s\n' "$line"
    grep -v "^$ACCOUNT:" "$file" || true
    [[ $id != 0 ]] || printf '%s\n' "$line"
}

create_account() {
    local uid=$1 gid=$2 content
    # No password matches "*". Unlike a locked account, sshd accepts it.
    content=$(with_account /etc/passwd "$ACCOUNT:*:$uid:$gid:Tridock:$ACCOUNT_HOME:/bin/bash" "$uid")
    printf '%s\n' "$content" >/etc/passwd
    content=$(with_account /etc/group "$ACCOUNT:x:$gid:" "$gid")
    printf '%s\n' "$content" >/etc/group
    mkdir -p "$ACCOUNT_HOME" "$STATE"
    chown "$uid:$gid" "$ACCOUNT_HOME" "$STATE"
    chmod 755 "$STATE"
}

# Prints the groups to keep: those of --group-add and those of the container's device files.
supplementary_groups() {
    local gid=$1
    {
        id -G | tr ' ' '\n'
        find /dev/dri /dev/kfd /dev/infiniband -type c -exec stat --format %g {} + 2>/dev/null || true
        printf '%s\n' "$gid"
    } | sed '/^0$/d' | sort -nu | paste -sd,
}

# Adds the account to these groups in /etc/group, where `docker exec --user tridock` reads them.
join_groups() {
    local groups=$1 id name
    for id in ${groups//,/ }; do
        name=$(getent group "$id" | cut -d: -f1) || { name=device$id; printf '%s:x:%s:\n' "$name" "$id" >>/etc/group; }
        [[ $name == "$ACCOUNT" ]] || usermod --append --groups "$name" "$ACCOUNT"
    done
}

# As root: runs this script again as the operator's user, unless the operator is root.
adopt_operator() {
    local uid gid groups
    uid=$(operator_id TRIDOCK_UID %u)
    gid=$(operator_id TRIDOCK_GID %g)
    create_account "$uid" "$gid"
    export HOME=$ACCOUNT_HOME USER=$ACCOUNT LOGNAME=$ACCOUNT
    [[ $uid != 0 ]] || return 0
    groups=$(supplementary_groups "$gid")
    join_groups "$groups"
    # None where the operator's group is root's and nothing else was added.
    local keep=(--clear-groups)
    [[ -z $groups ]] || keep=(--groups "$groups")
    exec setpriv --reuid "$uid" --regid "$gid" "${keep[@]}" -- "$0" "$@"
}

# Not as root: torch, git and others need a writable home and a user name.
settle_in() {
    export USER=${USER:-$ACCOUNT} LOGNAME=${LOGNAME:-$ACCOUNT}
    [[ -n ${HOME:-} && -w $HOME ]] || export HOME=/tmp
}

# ---- what the base image has every bash run ----------------------------------------------------------------------------

# Runs the base image's BASH_ENV once (NVIDIA's asks nvidia-smi, and enables the libraries for an older driver). What it
# exports becomes part of this environment, and of every later bash through bash-env.sh. Values that a process has
# changed since stay.
apply_base_environment() {
    local pair name value before
    rm -f "$STATE/bash-env.sh"
    [[ -n ${TRIDOCK_BASH_ENV:-} ]] || return 0
    while IFS= read -r -d '' pair; do
        name=${pair%%=*} value=${pair#*=}
        before=${!name-}
        is_shared_variable "$name" && [[ $name != BASH_ENV && $before != "$value" ]] || continue
        printf "[ \"\${%s-}\" != '%s' ] || export %s='%s'\n" \
            "$name" "${before//\'/$QUOTED_QUOTE}" "$name" "${value//\'/$QUOTED_QUOTE}"
        export "$name=$value"
    done < <(BASH_ENV=$TRIDOCK_BASH_ENV timeout 45 bash -c 'env -0 >&3' 3>&1 >/dev/null 2>&1) >"$STATE/.bash-env.sh.part"
    mv "$STATE/.bash-env.sh.part" "$STATE/bash-env.sh"
}

# ---- the environment of later sessions ---------------------------------------------------------------------------------

# Whether a variable belongs to the cluster, not to this process or to one run.
is_shared_variable() {
    case $1 in
    HOME | USER | LOGNAME | SHELL | SHLVL | PWD | OLDPWD | HOSTNAME | TERM | MAIL | _) return 1 ;;
    SSH_* | TRIDOCK_RUN_ID | TRIDOCK_WORLD_SIZE | TRIDOCK_RUN_FOLDER) return 1 ;;
    *) [[ $1 =~ ^[A-Za-z_][A-Za-z0-9_]*$ ]] ;;
    esac
}

# Prints the shared variables as NAME=VALUE, each followed by a zero byte.
shared_environment() {
    local pair
    while IFS= read -r -d '' pair; do
        is_shared_variable "${pair%%=*}" && printf '%s\0' "$pair"
    done < <(env -0 | sort -z)
    return 0
}

# For login shells: export NAME='VALUE', quoted for every POSIX shell.
render_shell_environment() {
    local pair value
    while IFS= read -r -d '' pair; do
        value=${pair#*=}
        printf "export %s='%s'\n" "${pair%%=*}" "${value//\'/$QUOTED_QUOTE}"
    done < <(shared_environment)
}

# For sshd: one SetEnv line (it reads only the first), each pair in double quotes with \ and " escaped.
render_setenv() {
    # bash takes a shell at level 1 for a user's, and does not run bash.bashrc for each command over ssh.
    local pair pairs=(SHLVL=1)
    while IFS= read -r -d '' pair; do
        # sshd's configuration cannot contain a newline; only login shells get such a variable.
        [[ $pair != *$'\n'* ]] || continue
        pair=${pair//\\/\\\\}
        pair=${pair//\"/\\\"}
        pairs+=("\"$pair\"")
    done < <(shared_environment)
    printf 'SetEnv %s\n' "${pairs[*]}"
}

write_environment() {
    # Written atomically: somebody may log in at the same time.
    (umask 077 && render_shell_environment >"$STATE/.environment.sh.part")
    mv "$STATE/.environment.sh.part" "$STATE/environment.sh"
}

# ---- a node: sshd ----------------------------------------------------------------------------------------------------

is_port() {
    [[ $1 =~ ^[1-9][0-9]{0,4}$ && $1 -le 65535 ]]
}

listen_addresses() {
    tr ',' '\n' <<<"${TRIDOCK_SSH_LISTEN:-0.0.0.0,::}" | tr -d ' \t' | grep . || true
}

render_sshd_config() {
    local port=$1 address
    cat <<EOF
Port $port
AddressFamily any
EOF
    while IFS= read -r address; do
        printf 'ListenAddress %s\n' "$address"
    done < <(listen_addresses)
    cat <<EOF
HostKey $SECRETS/ssh_host_ed25519_key
AuthorizedKeysFile $SECRETS/authorized_keys
PidFile $STATE/sshd.pid
AllowUsers $ACCOUNT
AuthenticationMethods publickey
PasswordAuthentication no
KbdInteractiveAuthentication no
PermitEmptyPasswords no
PermitRootLogin prohibit-password
UsePAM no
DisableForwarding yes
PermitUserEnvironment no
PrintMotd no
PrintLastLog no
UseDNS no
# A launch opens one connection to every node at the same moment.
MaxStartups 512:30:1024
MaxSessions 512
$(render_setenv)
EOF
}

require_account() {
    local uid
    uid=$(id -u)
    [[ $(getent passwd "$ACCOUNT" | cut -d: -f3) == "$uid" ]] ||
        fail "$EXIT_REQUEST" "sshd needs a passwd entry named $ACCOUNT for the user it runs as" "uid $uid" \
            "start the container as root (it drops to the uid in TRIDOCK_UID by itself), or mount an /etc/passwd with that entry"
}

require_secrets() {
    local file path owner mode
    local not_theirs="give the folder to the operator, or set TRIDOCK_UID to its owner"
    for path in "$SECRETS" "$SECRETS"/{ssh_host_ed25519_key,id_ed25519,authorized_keys,known_hosts,ssh_config}; do
        [[ -e $path ]] || fail "$EXIT_CLUSTER" "the node's key material is missing" "no $path" \
            "run 'tridock keys' for this cluster and mount its folder on $SECRETS"
        [[ -r $path && (! -d $path || -x $path) ]] || fail "$EXIT_CLUSTER" "the node's key material cannot be read by uid $(id -u)" \
            "$path of uid $(stat --format %u "$path")" "$not_theirs"
    done
    for file in ssh_host_ed25519_key id_ed25519; do
        path=$SECRETS/$file
        mode=$(stat --format %a "$path")
        (((8#$mode & 8#077) == 0)) || fail "$EXIT_CLUSTER" "a private key is open to others" "$path with mode $mode" "chmod 600 it on the host"
    done
    # sshd would refuse each login without a reason for the client, so it is reported here.
    for path in "$SECRETS" "$SECRETS/authorized_keys"; do
        mode=$(stat --format %a "$path")
        owner=$(stat --format %u "$path")
        (((8#$mode & 8#022) == 0)) || fail "$EXIT_CLUSTER" "others may write to the node's key material" "$path with mode $mode" \
            "chmod 700 the folder and 600 its files on the host"
        [[ $owner == 0 || $owner == "$(id -u)" ]] || fail "$EXIT_CLUSTER" "the node's key material belongs to somebody else" \
            "$path of uid $owner" "$not_theirs"
    done
}

# sshd starts even if one of several addresses is in use, and fails later. Check first.
require_free_port() {
    local port=$1 address complaint
    while IFS= read -r address; do
        complaint=$("$OWN/tridock-python" "$OWN/can-listen.py" "$address" "$port") ||
            fail "$EXIT_CLUSTER" "sshd cannot listen on $address port $port" "$complaint" \
                "stop what listens there ('ss -ltnp' on the host shows it), or change the cluster's ssh port or listen address"
    done < <(listen_addresses)
}

prepare_node() {
    local port=${TRIDOCK_SSH_PORT:-2222} complaint
    is_port "$port" || fail "$EXIT_REQUEST" "TRIDOCK_SSH_PORT is not a port" "$port" "set it to a number from 1 to 65535"
    require_account
    require_secrets
    require_free_port "$port"
    # Only root's sshd uses it, for privilege separation.
    [[ $(id -u) != 0 ]] || install -d -m 755 /run/sshd
    (umask 077 && render_sshd_config "$port" >"$STATE/sshd_config")
    complaint=$(/usr/sbin/sshd -t -f "$STATE/sshd_config" 2>&1) ||
        fail "$EXIT_CLUSTER" "sshd refuses its configuration" "$(one_line "$complaint")" "fix what it names ('tridock keys --rotate' replaces all keys)"
}

# What waited for slots of this node when it was killed. Ranks of other nodes are reached through their sshd, and this
# node's own must listen first.
start_queue() {
    compgen -G "/workspace/runs/.queue/*.json" >/dev/null || return 0
    local attempt
    for attempt in {1..100}; do
        [[ ! -s $STATE/sshd.pid ]] || break
        sleep 0.1
    done
    "$OWN/tridock-python" -P -m tridock.node start-next || printf 'the queue was not started (attempt %s)\n' "$attempt" >&2
}

# ---- together --------------------------------------------------------------------------------------------------------

main() {
    COMMAND=${1:-}
    if [[ $(id -u) == 0 ]]; then
        adopt_operator "$@"
    elif [[ ${USER:-} != "$ACCOUNT" ]]; then
        settle_in
    fi
    # A restarted container still has the files of its previous start.
    rm -f "$STATE"/{sshd_config,sshd.pid,greeted}
    apply_base_environment
    write_environment
    if [[ $COMMAND == node ]]; then
        prepare_node
        start_queue &
        set -- /usr/sbin/sshd -D -e -f "$STATE/sshd_config"
    fi
    exec "$@"
}

[[ ${BASH_SOURCE[0]} != "$0" ]] || main "$@"
