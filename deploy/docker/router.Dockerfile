# The router: no PyTorch, no compiler, nothing to write to. Build it in the root of a checkout:
#
#   docker build -f deploy/docker/router.Dockerfile -t fissile-router:0.1.0 .
#
# For a build that can be repeated, name the base by its digest: --build-arg BASE=docker.io/library/python@sha256:...
ARG BASE=docker.io/library/python:3.11.15-slim-bookworm

FROM ${BASE} AS build
# Another package index, if there is one: --build-arg PIP_INDEX_URL=https://...
ARG PIP_INDEX_URL
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
RUN python -m venv /opt/fissile
WORKDIR /src
COPY pyproject.toml hatch_build.py README.md LICENSE ./
COPY protos/ protos/
COPY common/ common/
COPY facade/ facade/
COPY router/ router/
# The wheel takes both in; the router never imports them (scripts/check_imports.py).
COPY kernels/ kernels/
COPY worker/ worker/
RUN /opt/fissile/bin/python -m pip install ./protos ".[router,http]"

FROM ${BASE}
# Names the user, so that libraries which look it up find it. Nothing is owned by it: it can change nothing here.
RUN useradd --uid 10001 --user-group --no-create-home --home-dir /tmp --shell /usr/sbin/nologin fissile
COPY --from=build /opt/fissile /opt/fissile
# Inside of a container loopback reaches nobody. FISSILE_ADDRESS and FISSILE_HEALTH_SERVICE are for `fissile health`.
ENV PATH=/opt/fissile/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    FISSILE_HOST=0.0.0.0 \
    FISSILE_LOG_FORMAT=json \
    FISSILE_ADDRESS=127.0.0.1:50051 \
    FISSILE_HEALTH_SERVICE=liveness
USER 10001:10001
WORKDIR /tmp
EXPOSE 50051
# SIGTERM drains. An engine that waits less than the drain timeout kills instead: docker stop --time 40.
STOPSIGNAL SIGTERM
# Liveness: a router without workers is to wait for them, not to be replaced. Kubernetes has probes of its own.
HEALTHCHECK --interval=10s --timeout=6s --start-period=20s --retries=3 CMD ["fissile", "health"]
ENTRYPOINT ["fissile"]
CMD ["router"]
