# Stages: base (what runs need from the distribution) → builder (the Python environment), megatron (its source,
# patched) → runtime.
#
#   make image               NVIDIA's PyTorch image, with its own torch
#   make image FLAVOR=cpu    the twin's image: the same recipe on Debian, with torch's CPU build
#
# No "syntax" line: it would be fetched from a registry, which not every machine can reach.
# For the same reason this file needs only the BuildKit of Docker 20.10 (no here-documents, no named contexts).

ARG BASE_IMAGE=nvcr.io/nvidia/pytorch:25.12-py3
ARG FLAVOR=gpu

# ---- base ------------------------------------------------------------------------------------------------------------
# hadolint ignore=DL3006
FROM ${BASE_IMAGE} AS base
SHELL ["/bin/bash", "-Eeuo", "pipefail", "-c"]
# The package creates ssh host keys; they are removed in the same layer, because a node receives its own.
# A proxy's CA is a build secret: it is available during the build and not stored in the image.
RUN --mount=type=bind,source=tools/image/ca.sh,target=/tools/ca.sh \
    --mount=type=secret,id=ca \
    --mount=type=cache,target=/var/cache/apt,sharing=locked \
    --mount=type=cache,target=/var/lib/apt/lists,sharing=locked \
    rm -f /etc/apt/apt.conf.d/docker-clean \
    && . /tools/ca.sh \
    && apt-get update -qq \
    && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends \
        ca-certificates iproute2 libaio1* libgomp1 libnuma1 numactl openssh-client openssh-server pdsh procps python3 rsync tini \
    && rm -f /etc/ssh/ssh_host_* \
    && rm -rf /var/log/apt /var/log/dpkg.log /var/cache/debconf/*-old

FROM base AS base-gpu
ENV DS_ACCELERATOR=cuda

FROM base AS base-cpu
ENV DS_ACCELERATOR=cpu

# ---- builder ---------------------------------------------------------------------------------------------------------
# hadolint ignore=DL3006
FROM base-${FLAVOR} AS builder
ARG FLAVOR
RUN --mount=type=bind,source=tools/image/ca.sh,target=/tools/ca.sh \
    --mount=type=secret,id=ca \
    --mount=type=cache,target=/var/cache/apt,sharing=locked \
    --mount=type=cache,target=/var/lib/apt/lists,sharing=locked \
    . /tools/ca.sh \
    && apt-get update -qq \
    && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends libaio-dev \
    && if [ "$FLAVOR" = cpu ]; then \
        DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends g++ python3-dev python3-venv; \
    fi
# NVIDIA's images constrain pip to their own versions; here only the locks decide.
ENV PIP_CONSTRAINT= PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
# The layer depends only on the folders mounted here: an edit elsewhere does not rebuild it.
RUN --mount=type=bind,source=tools/image,target=/src/tools/image \
    --mount=type=bind,source=tools/python,target=/src/tools/python \
    --mount=type=bind,source=locks,target=/src/locks \
    --mount=type=secret,id=ca \
    --mount=type=cache,target=/root/.cache/pip \
    --mount=type=cache,target=/root/.cache/uv \
    . /src/tools/image/ca.sh \
    && /src/tools/image/environment.sh /opt/venv "$FLAVOR"

# ---- megatron --------------------------------------------------------------------------------------------------------
# tools/megatron-source.sh fetches the source into upstream/. Without it the folder stays empty, and runs with the
# engine are rejected.
# hadolint ignore=DL3006
FROM base AS megatron
RUN --mount=type=bind,source=tools/image/ca.sh,target=/tools/ca.sh \
    --mount=type=secret,id=ca \
    --mount=type=cache,target=/var/cache/apt,sharing=locked \
    --mount=type=cache,target=/var/lib/apt/lists,sharing=locked \
    --mount=type=bind,source=upstream,target=/src/upstream \
    [ ! -f /src/upstream/megatron-v1.1.5/pretrain_gpt2.py ] \
    || { . /tools/ca.sh \
        && apt-get update -qq \
        && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends git; }
RUN --mount=type=bind,source=upstream,target=/src/upstream \
    --mount=type=bind,source=patches,target=/src/patches \
    --mount=type=bind,source=tools/image-megatron.sh,target=/src/image-megatron.sh \
    /src/image-megatron.sh /src/upstream/megatron-v1.1.5 /src/patches/megatron-v1.1.5 /opt/megatron-v1.1.5

# ---- trackers --------------------------------------------------------------------------------------------------------
# The libraries of trackers and notifications, in an environment of their own; empty without TRACKERS=yes.
# hadolint ignore=DL3006
FROM builder AS trackers
ARG FLAVOR
ARG TRACKERS=
RUN --mount=type=bind,source=tools/image,target=/src/tools/image \
    --mount=type=bind,source=tools/python,target=/src/tools/python \
    --mount=type=bind,source=locks,target=/src/locks \
    --mount=type=secret,id=ca \
    --mount=type=cache,target=/root/.cache/pip \
    --mount=type=cache,target=/root/.cache/uv \
    . /src/tools/image/ca.sh \
    && /src/tools/image/trackers.sh /opt/trackers "$FLAVOR" "$TRACKERS"

# ---- runtime ---------------------------------------------------------------------------------------------------------
# hadolint ignore=DL3006
FROM base-${FLAVOR} AS runtime
ARG FLAVOR
ARG BASE_IMAGE
COPY --from=builder /opt/venv /opt/venv
COPY --from=megatron /opt/megatron-v1.1.5 /opt/megatron-v1.1.5
COPY --from=trackers /opt/trackers /opt/trackers
# One Include, so that every ssh inside a node, also pdsh's, finds the cluster's keys and host names.
# The entrypoint writes to the state folder. It is world-writable because the container may start with --user.
RUN printf 'Include /run/tridock/secrets/ssh_config\n' >/etc/ssh/ssh_config.d/tridock.conf \
    && mkdir -p /workspace /opt/tridock /run/tridock/secrets /home/tridock \
    && install -d -m 1777 /run/tridock/state \
    && ln -s /opt/tridock/entrypoint/profile.sh /etc/profile.d/tridock.sh \
    && ln -s /opt/tridock/entrypoint/pretrain_gpt2.py /pretrain_gpt2.py
# NVIDIA's image has every bash run a script that asks nvidia-smi, which takes seconds where the driver is not kept
# loaded. The entrypoint runs it once, and writes what it exports for every other bash.
ENV TRIDOCK_BASH_ENV=${BASH_ENV}
ENV BASH_ENV=/run/tridock/state/bash-env.sh \
    PATH=/opt/venv/bin:/opt/tridock/entrypoint:${PATH} \
    PYTHONPATH=/opt/tridock \
    PYTHONUNBUFFERED=1 \
    PDSH_RCMD_TYPE=ssh
WORKDIR /workspace
ENTRYPOINT ["tini", "-s", "--", "/opt/tridock/entrypoint/entrypoint.sh"]
CMD ["bash"]
HEALTHCHECK --interval=5s --timeout=5s --start-period=60s --retries=3 CMD ["/opt/tridock/entrypoint/healthcheck.sh"]

# The layers from here on are cheap: what changes with every edit comes last.
COPY configs /opt/tridock/configs
COPY entrypoint /opt/tridock/entrypoint
ARG GIT_COMMIT=unknown
ARG SOURCE=unknown
ARG VERSION=unknown
# In one layer, with what is compiled: this is what an edit sends to the hosts. Files have the modes of the folder that
# the image is built from: those of a clone made under umask 077 would be root's alone.
RUN --mount=type=bind,source=tridock,target=/code/tridock \
    --mount=type=bind,source=tools/image-manifest.py,target=/image-manifest.py \
    cp -R /code/tridock /opt/tridock/ && python3 -m compileall -q /opt/tridock/tridock \
    && /opt/venv/bin/python /image-manifest.py --flavor "$FLAVOR" --base-image "$BASE_IMAGE" --git-commit "$GIT_COMMIT" --version "$VERSION" \
        >/opt/tridock/manifest.json \
    && find /opt/tridock ! -type l ! -perm -o=r -exec chmod a+rX {} +
LABEL org.opencontainers.image.title="tridock" \
    org.opencontainers.image.description="One node of a 3D-parallel training cluster: DeepSpeed, Megatron, sshd" \
    org.opencontainers.image.source="${SOURCE}" \
    org.opencontainers.image.licenses="Apache-2.0" \
    org.opencontainers.image.version="${VERSION}" \
    org.opencontainers.image.revision="${GIT_COMMIT}" \
    org.opencontainers.image.base.name="${BASE_IMAGE}"
