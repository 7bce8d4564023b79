# The worker on AMD GPUs: Fissile in AMD's own image, on its PyTorch, ROCm and AITER. In the root of a checkout:
#
#   docker build -f deploy/docker/worker-rocm.Dockerfile -t fissile-worker-rocm:0.1.0 .
#
# BASE must have Python 3.11 or newer, PyTorch for ROCm, and AITER with its kernels prebuilt for the GPUs at hand: AITER
# compiles what is missing at the first call, which can take 20 minutes. AMD's ATOM images do. Name yours by its digest.
ARG BASE=docker.io/rocm/atom:rocm7.2.4_ubuntu24.04_py3.12_pytorch_release_2.10.0_atom0.1.4

# One stage: PyTorch and AITER are in the base's own environment, and a virtual environment would hide them.
FROM ${BASE}
ARG PIP_INDEX_URL
# Ubuntu keeps pip out of its own Python, which in AMD's images is the one with PyTorch.
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PIP_BREAK_SYSTEM_PACKAGES=1
USER 0
# Mooncake's client, a KV tier, is linked with these.
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends libcurl4 libibverbs1 libnuma1 && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY pyproject.toml hatch_build.py README.md LICENSE ./
COPY protos/ protos/
COPY common/ common/
COPY kernels/ kernels/
COPY worker/ worker/
COPY facade/ facade/
COPY router/ router/
# PyTorch, Triton and AITER stay what they are: pip is held to them by constraints, and their lines are compared at the
# end. Hugging Face's distribution `kernels` would overwrite our package of that name, or be overwritten.
RUN python3 -c 'import torch; assert torch.version.hip, f"{torch.__version__} is no PyTorch for ROCm"' \
    && python3 -c 'from importlib.util import find_spec; assert find_spec("aiter"), "the base has no AITER"' \
    && python3 -m pip list --format=freeze >/tmp/before \
    && if grep -q '^kernels==' /tmp/before; then echo "the base has Hugging Face's distribution kernels" >&2; exit 1; fi \
    && grep -E '^(torch|triton|pytorch-triton-rocm|amd-aiter)==' /tmp/before >/tmp/held \
    && python3 -m pip install --constraint /tmp/held ./protos ".[worker,smg,redis,mooncake]" \
    && python3 -m pip list --format=freeze >/tmp/after \
    && test "$(grep -cxFf /tmp/held /tmp/after)" = "$(wc -l </tmp/held)" \
    && rm -rf /src/* /tmp/before /tmp/held /tmp/after
COPY deploy/demo/checkpoint/ /models/demo/
# /cache is for models of the Hub and for kernels that AITER compiles when they are missing.
RUN useradd --uid 10001 --user-group --no-create-home --home-dir /tmp --shell /usr/sbin/nologin fissile \
    && install -d -o 10001 -g 10001 /cache
ENV PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    FISSILE_WORKER_HOST=0.0.0.0 \
    FISSILE_MODEL=/models/demo \
    FISSILE_LOG_FORMAT=json \
    FISSILE_ADDRESS=127.0.0.1:50061 \
    FISSILE_HEALTH_SERVICE=liveness \
    HF_HOME=/cache \
    FISSILE_WEIGHTS_CACHE=/cache/fissile-weights \
    AITER_JIT_DIR=/cache/aiter \
    TRITON_CACHE_DIR=/cache/triton
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
