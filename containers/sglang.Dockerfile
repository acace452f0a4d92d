# megarl, and SGLang in an environment of its own, on CUDA 13; recipes have [rollout] sglang_python =
# "/opt/sglang/bin/python". docker build -f containers/sglang.Dockerfile -t megarl:sglang .
ARG CUDA=13.0.3

FROM nvidia/cuda:${CUDA}-devel-ubuntu24.04 AS wheels
RUN apt-get update && apt-get install -y --no-install-recommends g++ python3-dev python3-venv
COPY . /src
RUN python3 -m venv /venv && /venv/bin/pip wheel --no-deps -w /wheels -c /src/constraints.txt \
    -C cmake.define.MEGARL_CUDA=ON /src pycosat

FROM nvidia/cuda:${CUDA}-base-ubuntu24.04
# at run time Triton calls g++, FlashInfer and DeepGEMM call nvcc, and NCCL reaches InfiniBand through the providers
RUN minor="${CUDA_VERSION#*.}" && cuda="${CUDA_VERSION%%.*}-${minor%%.*}" \
    && apt-get update && apt-get install -y --no-install-recommends \
    "cuda-nvcc-$cuda" "cuda-cuobjdump-$cuda" "cuda-cudart-dev-$cuda" "cuda-nvrtc-dev-$cuda" "libcublas-dev-$cuda" \
    "libcurand-dev-$cuda" g++ ibverbs-providers libnuma1 ninja-build python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*
RUN python3 -m venv /opt/venv && python3 -m venv /opt/sglang
ENV PATH=/opt/venv/bin:$PATH
RUN --mount=type=bind,from=wheels,target=/build pip install --no-cache-dir -c /build/src/constraints.txt \
    --find-links /build/wheels "$(echo /build/wheels/megarl_core-*.whl)[train,sql]"
# without our constraints: SGLang asks for another torch
RUN --mount=type=bind,from=wheels,target=/build /opt/sglang/bin/pip install --no-cache-dir \
    "$(echo /build/wheels/megarl_core-*.whl)[sglang]"
