# Lockstep in a container, as `lockstep kubernetes` starts it. For CPUs:
#
#   docker build -t lockstep .
#
# For GPUs, from an image that has Python 3.11 or newer and a CUDA build of torch 2.8 or newer, which stays as it is:
#
#   docker build -t lockstep:cuda --build-arg BASE=pytorch/pytorch:2.8.0-cuda12.8-cudnn9-runtime .
#
# Your own code on top of it: FROM lockstep, then COPY it to the working directory.
ARG BASE=python:3.13-slim
FROM ${BASE}

# Where torch comes from if the base has none: builds without CUDA, which are a tenth of the size. What it needs comes with Lockstep.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
# Shown by `lockstep --version`: --build-arg COMMIT=$(git rev-parse --short=12 HEAD)
ARG COMMIT=unknown

ENV PYTHONUNBUFFERED=1 PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_BREAK_SYSTEM_PACKAGES=1

COPY pyproject.toml setup.py README.md LICENSE constraints.txt /opt/lockstep/
COPY src /opt/lockstep/src
RUN cd /opt/lockstep \
    && echo "$COMMIT" > src/lockstep/commit.txt \
    && if python -c "import torch" 2> /dev/null; then grep -v "^torch" constraints.txt > used.txt; else \
       cp constraints.txt used.txt && pip install --no-deps torch -c used.txt --index-url "$TORCH_INDEX"; fi \
    && pip install ".[tensorboard]" -c used.txt \
    && rm -rf /opt/lockstep

# The user of the pods (`lockstep kubernetes --user`), with a home folder and a working directory of its own.
RUN useradd --uid 1000 --non-unique --create-home lockstep && install -d -o 1000 -g 1000 /workspace
USER 1000
WORKDIR /workspace
CMD ["lockstep", "doctor", "--no-exchange"]
