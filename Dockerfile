# The service on the embedded model:            docker run --rm -p 50051:50051 photon-grpc
# Another model, on a GPU:                      docker run --rm --gpus all -p 50051:50051 -v DIR:/model:ro photon-grpc --model /model
# PyTorch's default wheels bring CUDA's user-space libraries; the host adds the driver (NVIDIA container toolkit). For a
# smaller image without them, let PIP_ARGS choose a CPU wheel: docker build --build-arg PIP_ARGS=... .

FROM python:3.12-slim AS build
ARG PIP_ARGS=""
RUN python -m venv /opt/photon
WORKDIR /src
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY photon_grpc photon_grpc
RUN /opt/photon/bin/pip install --no-cache-dir --disable-pip-version-check ${PIP_ARGS} -c constraints.txt ".[serve]"

FROM python:3.12-slim
# Triton compiles a small launcher with the system's compiler when a kernel first runs.
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 10001 photon
COPY --from=build /opt/photon /opt/photon
ENV PATH=/opt/photon/bin:$PATH PYTHONUNBUFFERED=1
USER photon
EXPOSE 50051
# SIGTERM drains: running requests get --drain-timeout (30 s); give `docker stop` more than that.
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=5s --start-period=300s --retries=3 CMD ["python", "-c", "\
import sys, grpc; \
from grpc_health.v1.health_pb2 import HealthCheckRequest; \
from grpc_health.v1.health_pb2_grpc import HealthStub; \
stub = HealthStub(grpc.insecure_channel('127.0.0.1:50051')); \
answer = stub.Check(HealthCheckRequest(service='photon_grpc.v1.InferenceService'), timeout=3); \
sys.exit(answer.status != 1)"]
ENTRYPOINT ["photon-grpc", "serve", "--listen", "0.0.0.0:50051"]
