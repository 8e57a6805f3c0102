# syntax=docker/dockerfile:1
# Images of verl, for a processor or for NVIDIA GPUs:
#
#   docker build --target cuda -t verl:cuda .
#   docker build --target cpu -t verl:cpu --build-arg TORCH_FLAGS="--index-url INDEX" .
#
# On x86 the torch of PyPI carries CUDA; INDEX is PyTorch's own for processors, whose builds are smaller. The versions are the ones
# of constraints.txt, with which the test suite runs.
ARG PYTHON=3.11

FROM python:${PYTHON}-slim AS wheel
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
WORKDIR /source
COPY pyproject.toml setup.py README.md LICENSE ./
COPY packages packages
COPY verl verl
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels . ./packages/verl-*

FROM python:${PYTHON}-slim AS cpu
ARG TORCH=2.13.0
ARG TORCH_FLAGS=
ARG EXTRAS=ray,tensorboard,datasets,gguf
# KubeRay asks for its state with wget
RUN apt-get update && apt-get install -y --no-install-recommends wget && rm -rf /var/lib/apt/lists/*
COPY constraints.txt /etc/verl/
RUN pip install --no-cache-dir ${TORCH_FLAGS} torch==${TORCH}
RUN --mount=type=bind,from=wheel,source=/wheels,target=/wheels \
    pip install --no-cache-dir -c /etc/verl/constraints.txt "$(echo /wheels/verl-*.whl)[${EXTRAS}]" /wheels/verl_*.whl
RUN useradd --create-home --uid 1000 verl && install -d -o verl /runs
# the number, by which Kubernetes knows that it is not root
USER 1000
WORKDIR /runs
ENTRYPOINT ["verl"]
CMD ["--help"]

FROM cpu AS cuda
USER root
# Triton compiles its launchers when a kernel is first used
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER 1000
