# The worker on NVIDIA's GPUs, with PyTorch's CUDA build from PyPI and the demo model. In the root of a checkout:
#
#   docker build -f deploy/docker/worker-cuda.Dockerfile -t fissile-worker-cuda:0.1.0 .
#
# It runs with `docker run --gpus all`. The host has the driver (580 or newer, for CUDA 13) and NVIDIA's container toolkit.
# For a build that can be repeated, name the base by its digest: --build-arg BASE=docker.io/library/python@sha256:...
ARG BASE=docker.io/library/python:3.11.15-slim-bookworm

FROM ${BASE} AS build
ARG PIP_INDEX_URL
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
# Compiles the CPU kernels when Fissile is installed.
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
RUN python -m venv /opt/fissile
WORKDIR /src
# PyTorch in a layer of its own: with CUDA and Triton, it is most of the image and changes least. The version is that of
# the `cpu` extra.
COPY pyproject.toml ./
RUN torch="$(sed -nE 's/^cpu = \["(torch==[^"]+)\+cpu"\].*/\1/p' pyproject.toml)" \
    && /opt/fissile/bin/python -m pip install "${torch:?no torch in pyproject.toml}" \
    && /opt/fissile/bin/python -c 'import torch; assert torch.version.cuda, f"{torch.__version__} is no PyTorch for CUDA"'
COPY hatch_build.py README.md LICENSE ./
COPY protos/ protos/
COPY common/ common/
COPY kernels/ kernels/
COPY worker/ worker/
COPY facade/ facade/
COPY router/ router/
RUN /opt/fissile/bin/python -m pip install ./protos ".[worker,smg,redis,mooncake,triton]"

FROM ${BASE}
# Triton compiles launchers of its kernels with a C compiler when a worker starts. Mooncake's client, a KV tier, is linked
# with the other libraries.
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev libcurl4 libibverbs1 libnuma1 \
    && rm -rf /var/lib/apt/lists/*
# Names the user, so that libraries which look it up find it (PyTorch does). /cache is for models of the Hub, and
# for compiled kernels.
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
    FISSILE_WEIGHTS_CACHE=/cache/fissile-weights \
    TRITON_CACHE_DIR=/cache/triton \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER 10001:10001
WORKDIR /tmp
VOLUME ["/cache"]
EXPOSE 50061
# SIGTERM drains. An engine that waits less than the drain timeout kills instead: docker stop --time 40.
STOPSIGNAL SIGTERM
# Liveness: a worker that still loads its model is well. Kubernetes has probes of its own.
HEALTHCHECK --interval=10s --timeout=6s --start-period=120s --retries=3 CMD ["fissile", "health"]
ENTRYPOINT ["fissile"]
CMD ["worker"]
