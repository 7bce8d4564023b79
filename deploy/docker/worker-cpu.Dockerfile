# The worker on CPUs, with PyTorch's CPU build and the demo model. Build it in the root of a checkout:
#
#   docker build -f deploy/docker/worker-cpu.Dockerfile -t fissile-worker-cpu:0.1.0 .
#
# For a build that can be repeated, name the base by its digest: --build-arg BASE=docker.io/library/python@sha256:...
# 3.11 is the Python that the pinned CPU build of PyTorch has been tried with.
ARG BASE=docker.io/library/python:3.11.15-slim-bookworm

FROM ${BASE} AS build
# Where PyTorch's CPU build and what it needs are (the `cpu` extra pins its version), and another package index for the
# rest, if there is one.
ARG TORCH_INDEX_URL=https://download.pytorch.org/whl/cpu
ARG PIP_INDEX_URL
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
# Compiles the CPU kernels when Fissile is installed; the last stage has no compiler, so any version of it will do.
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
RUN python -m venv /opt/fissile
WORKDIR /src
# PyTorch in a layer of its own: it is most of the image and changes least.
COPY pyproject.toml ./
RUN torch="$(sed -nE 's/^cpu = \["(torch==[^"]+\+cpu)"\].*/\1/p' pyproject.toml)" \
    && /opt/fissile/bin/python -m pip install --index-url "${TORCH_INDEX_URL}" "${torch:?no torch in pyproject.toml}"
COPY hatch_build.py README.md LICENSE ./
COPY protos/ protos/
COPY common/ common/
COPY kernels/ kernels/
COPY worker/ worker/
COPY facade/ facade/
COPY router/ router/
RUN /opt/fissile/bin/python -m pip install ./protos ".[worker,smg,redis,mooncake,cpu]"

FROM ${BASE}
# Mooncake's client, a KV tier, is linked with these.
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends libcurl4 libibverbs1 libnuma1 && rm -rf /var/lib/apt/lists/*
# Names the user, so that libraries which look it up find it (PyTorch does). /cache is for models of the Hub.
RUN useradd --uid 10001 --user-group --no-create-home --home-dir /tmp --shell /usr/sbin/nologin fissile \
    && install -d -o 10001 -g 10001 /cache
COPY --from=build /opt/fissile /opt/fissile
COPY deploy/demo/checkpoint/ /models/demo/
ENV PATH=/opt/fissile/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    FISSILE_WORKER_HOST=0.0.0.0 \
    FISSILE_MODEL=/models/demo \
    FISSILE_LOG_FORMAT=json \
    FISSILE_ADDRESS=127.0.0.1:50061 \
    FISSILE_HEALTH_SERVICE=liveness \
    HF_HOME=/cache \
    FISSILE_WEIGHTS_CACHE=/cache/fissile-weights
USER 10001:10001
WORKDIR /tmp
VOLUME ["/cache"]
EXPOSE 50061
# SIGTERM drains. An engine that waits less than the drain timeout kills instead: docker stop --time 40.
STOPSIGNAL SIGTERM
# Liveness: a worker that still loads its model is well. Kubernetes has probes of its own.
HEALTHCHECK --interval=10s --timeout=6s --start-period=60s --retries=3 CMD ["fissile", "health"]
ENTRYPOINT ["fissile"]
CMD ["worker"]
