#!/usr/bin/env bash
# Gets debian:bookworm-slim where it is not there yet. A machine that reaches no image registry gets a stand-in with that
# name, made from Debian's own packages; the Dockerfile builds on it unchanged.
#
#   tools/base-image.sh [TAG]        a stand-in needs root and apt (debootstrap is installed where it is missing)
#
# What the official image would not know about this machine goes in as well, so that a build inside it gets
# through where the machine itself gets through: its extra CA certificates, pip's index settings, apt's options.
set -Eeuo pipefail

readonly TAG=${1:-debian:bookworm-slim}
readonly SUITE=bookworm
readonly CA_BUNDLE=/etc/ssl/certs/ca-certificates.crt

die() {
    printf '%s\n' "$1" >&2
    exit 3
}

require_root_and_apt() {
    [[ $(id -u) == 0 ]] || die "base-image: debootstrap needs root; got uid $(id -u); run it with sudo, or pull $TAG"
    command -v apt-get >/dev/null || die "base-image: apt-get is needed to make a stand-in for $TAG; run it on Debian or Ubuntu, or pull $TAG"
}

install_debootstrap() {
    # Ubuntu's debootstrap knows Debian's suites, and verifies them only with Debian's keyring.
    [[ -x /usr/sbin/debootstrap && -e /usr/share/keyrings/debian-archive-keyring.gpg ]] && return
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get -o DPkg::Lock::Timeout=300 install -y -qq --no-install-recommends debootstrap debian-archive-keyring >/dev/null
}

# Prints the archives of this machine that hold the suite: "<uri> <codename> <components>", one a line.
# Nothing is printed on another distribution; debootstrap's default mirror serves then.
machine_archives() {
    # shellcheck disable=SC2016 # apt expands these, not the shell
    apt-get indextargets --format '$(REPO_URI) $(RELEASE) $(COMPONENT)' 'Created-By: Packages' 2>/dev/null |
        awk -v suite="$SUITE" '$2 ~ "^" suite "(-updates|-security)?$" && $3 == "main" && $1 ~ /^https?:/' | sort -u
}

bootstrap() {
    local root=$1 mirror
    mirror=$(machine_archives | awk -v suite="$SUITE" '$2 == suite { print $1; exit }')
    # shellcheck disable=SC2086 # no mirror is no argument: debootstrap then takes its own default
    debootstrap --variant=minbase --include=ca-certificates "$SUITE" "$root" $mirror >"$root.log" 2>&1 ||
        { tail -n 20 "$root.log" >&2; die "base-image: debootstrap failed; its last lines are above; check that this machine reaches a Debian mirror"; }
    if [[ -n $mirror ]]; then
        machine_archives | sed 's/^/deb /' >"$root/etc/apt/sources.list"
    fi
}

copy_certificates() {
    local root=$1
    if compgen -G '/usr/local/share/ca-certificates/*.crt' >/dev/null; then
        cp /usr/local/share/ca-certificates/*.crt "$root/usr/local/share/ca-certificates/"
    fi
    chroot "$root" update-ca-certificates >/dev/null 2>&1
    # A machine whose bundle was extended in place has certificates that the step above does not see.
    if [[ -s $CA_BUNDLE && $(grep -c BEGIN "$CA_BUNDLE") -gt $(grep -c BEGIN "$root$CA_BUNDLE") ]]; then
        cp "$CA_BUNDLE" "$root/usr/local/share/ca-certificates/machine-bundle.crt"
        cat "$CA_BUNDLE" >"$root$CA_BUNDLE"
    fi
}

# pip's settings that still mean something in a container: addresses do, folders of this machine do not.
copy_pip_settings() {
    local root=$1 python
    python=$(command -v python3) || return 0
    "$python" -m pip config list 2>/dev/null | awk '
        match($0, /^(global|install|:env:)\.(index-url|extra-index-url|trusted-host|proxy|timeout|default-timeout|cert)=/) {
            name = $0; sub(/=.*/, "", name); sub(/^(global|install|:env:)\./, "", name); sub(/^default-/, "", name)
            value = substr($0, RLENGTH + 1); gsub(/^'\''|'\''$/, "", value)
            if (name == "cert") value = "'"$CA_BUNDLE"'"
            if (name ~ /index-url$/) {
                count = split(value, urls, /(\\n|[ \t])+/); value = ""
                for (i = 1; i <= count; i++) if (urls[i] ~ /^https?:/) value = value (value == "" ? "" : " ") urls[i]
            }
            if (value != "") settings[name] = value
        }
        END { print "[global]"; for (name in settings) print name " = " settings[name] }' >"$root/etc/pip.conf"
}

# apt's options that decide whether a download succeeds here: proxies, and how old an archive may be.
copy_apt_settings() {
    local root=$1
    # shellcheck disable=SC2016 # apt expands these, not the shell
    apt-config dump --format '%F "%v";%n' 2>/dev/null |
        grep -E '^Acquire::(https?::Proxy(::[^ ]*)?|Check-Valid-Until|Check-Date|Retries|AllowInsecureRepositories|https?::Verify-[A-Za-z]+) ' |
        grep -v ' "";$' >"$root/etc/apt/apt.conf.d/90machine" || true
    # As in the official image: nothing that only a person at a terminal would want.
    printf 'Acquire::Languages "none";\nAPT::Install-Recommends "false";\n' >"$root/etc/apt/apt.conf.d/90container"
}

slim() {
    local root=$1
    chroot "$root" apt-get clean
    rm -rf "$root"/var/lib/apt/lists/* "$root"/var/cache/debconf/*-old "$root"/var/log/{apt,bootstrap.log,dpkg.log} \
        "$root"/usr/share/{man,info,locale,groff,lintian}/* "$root"/var/cache/apt/*.bin
    find "$root/usr/share/doc" -type f ! -name copyright -delete
    # The official slim image drops documentation too, and has dpkg drop that of later packages.
    printf '%s\n' 'path-exclude /usr/share/doc/*' 'path-include /usr/share/doc/*/copyright' 'path-exclude /usr/share/man/*' \
        'path-exclude /usr/share/info/*' 'path-exclude /usr/share/locale/*' >"$root/etc/dpkg/dpkg.cfg.d/docker"
    : >"$root/etc/machine-id"
}

main() {
    local work complaint
    docker image inspect "$TAG" >/dev/null 2>&1 && return
    complaint=$(docker pull --quiet "$TAG" 2>&1) && return
    printf '%s cannot be pulled (%s); making a stand-in from Debian packages\n' "$TAG" "${complaint##*: }"
    require_root_and_apt
    install_debootstrap
    work=$(mktemp -d)
    # shellcheck disable=SC2064 # the folder's name is wanted now
    trap "rm -rf '$work' '$work.log'" EXIT
    chmod 755 "$work"
    bootstrap "$work/root"
    copy_certificates "$work/root"
    copy_pip_settings "$work/root"
    copy_apt_settings "$work/root"
    slim "$work/root"
    tar -C "$work/root" --numeric-owner --exclude='./dev/*' -c . |
        docker import --change 'CMD ["bash"]' --message 'stand-in made with debootstrap' - "$TAG" >/dev/null
}

main
