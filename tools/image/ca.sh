# shellcheck shell=bash
# Sourced by the Dockerfile's steps. Where the build was given a CA (make image CA=FILE), everything that downloads trusts it
# beside the base's own bundle, for this step only.
if [[ -s /run/secrets/ca ]]; then
    cat /etc/ssl/certs/ca-certificates.crt /run/secrets/ca >/tmp/build-ca.crt 2>/dev/null || cp /run/secrets/ca /tmp/build-ca.crt
    printf 'Acquire::https::CAInfo "/tmp/build-ca.crt";\n' >/tmp/build-ca.apt
    export SSL_CERT_FILE=/tmp/build-ca.crt PIP_CERT=/tmp/build-ca.crt REQUESTS_CA_BUNDLE=/tmp/build-ca.crt APT_CONFIG=/tmp/build-ca.apt
    trap 'rm -f /tmp/build-ca.crt /tmp/build-ca.apt' EXIT
fi
