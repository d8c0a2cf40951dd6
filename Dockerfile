# The service as a container: uid 10001, no start-up script, and a root that may be read-only.
#
#   docker build --target cpu -t photon-grpc:cpu .      without CUDA
#   docker build --target cuda -t photon-grpc:cuda .    PyTorch's default wheels with CUDA's user-space libraries; the
#                                                       driver is the host's (NVIDIA container toolkit)
#   docker run --rm -p 127.0.0.1:50051:50051 photon-grpc:cpu                                   the embedded model
#   docker run --rm --gpus all -p 127.0.0.1:50051:50051 -v "$PWD/model:/model:ro" -v photon-cache:/var/cache/photon \
#     photon-grpc:cuda serve --model /model
#   docker run --rm -p 127.0.0.1:50051:50051 -p 127.0.0.1:8000:8000 photon-grpc:cpu serve --http-listen 0.0.0.0:8000
#                                                                                              with the HTTP server
#   docker run --rm photon-grpc:cpu doctor                                                     any other verb
#
# Slow layers come before those that change often: PyTorch, the other packages, the source. See docs/operations.md.

ARG PYTHON_VERSION=3.12

FROM python:${PYTHON_VERSION}-slim AS base
ENV PATH=/opt/photon/bin:$PATH PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONUNBUFFERED=1

# Only the dependencies, so that other changes of pyproject.toml do not invalidate the layers that follow.
FROM base AS requirements
COPY pyproject.toml /
RUN python -c "import tomllib; project = tomllib.load(open('/pyproject.toml', 'rb'))['project']; \
extras = project['optional-dependencies']; \
print(*project['dependencies'], *extras['serve'], *extras['http'], *extras['otel'], sep='\n')" > /requirements.txt

FROM base AS wheel
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY photon_grpc photon_grpc
RUN pip wheel --no-deps --wheel-dir /wheel .

FROM base AS venv
RUN python -m venv /opt/photon
COPY constraints.txt /

FROM venv AS packages-cpu
# The wheels without CUDA are in PyTorch's own index; all other packages come from pip's default index.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN pip install --no-deps --index-url "${TORCH_INDEX}" -c /constraints.txt torch
COPY --from=requirements /requirements.txt /
RUN pip install -c /constraints.txt -r /requirements.txt

FROM venv AS packages-cuda
RUN pip install -c /constraints.txt torch
COPY --from=requirements /requirements.txt /
RUN pip install -c /constraints.txt -r /requirements.txt

FROM base AS runtime
# tini is process 1: it reaps children, and forwards a SIGTERM that comes before Python has a handler for it.
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends tini && rm -rf /var/lib/apt/lists/* \
    && install -d -o 10001 -g 0 -m 0775 /var/cache/photon
# The cache holds compiled kernels and downloaded models. Some libraries need a HOME.
ENV PHOTON_LISTEN=0.0.0.0:50051 \
    HOME=/var/cache/photon \
    TRITON_CACHE_DIR=/var/cache/photon/triton \
    HF_HOME=/var/cache/photon/huggingface
VOLUME /var/cache/photon
EXPOSE 50051
# SIGTERM drains: running requests have --drain-timeout (30 s) to finish; give `docker stop` a longer timeout.
STOPSIGNAL SIGTERM
# The check calls PHOTON_TARGET (127.0.0.1:50051), in clear text unless PHOTON_TLS_CA is set. With TLS, have the service
# also listen on a Unix socket, and set PHOTON_TARGET to it.
HEALTHCHECK --interval=10s --timeout=10s --start-period=10m --start-interval=2s --retries=3 CMD ["photon-grpc", "health"]
ENTRYPOINT ["tini", "--", "photon-grpc"]
CMD ["serve"]
ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="photon-grpc" \
      org.opencontainers.image.description="A gRPC-native LLM inference service" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"

FROM runtime AS cpu
COPY --from=packages-cpu /opt/photon /opt/photon
RUN --mount=type=bind,from=wheel,source=/wheel,target=/wheel pip install --no-deps /wheel/*.whl
# The uid is a number, so that runAsNonRoot can check it; OpenShift gives every uid the group 0.
USER 10001:0

FROM runtime AS cuda
# Triton compiles the launcher of each kernel with the system's compiler.
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
COPY --from=packages-cuda /opt/photon /opt/photon
RUN --mount=type=bind,from=wheel,source=/wheel,target=/wheel pip install --no-deps /wheel/*.whl
USER 10001:0
