# megarl on NVIDIA's PyTorch with its Transformer Engine: docker build -f containers/ngc.Dockerfile -t megarl:ngc .
# 26.06 has torch 2.13, Transformer Engine 2.16 and CUDA 13.3
ARG NGC=26.06-py3

FROM nvcr.io/nvidia/pytorch:${NGC} AS wheels
COPY . /src
# of the tested versions only these: for packages of its own the image has constraints in $PIP_CONSTRAINT
RUN pip wheel --no-deps -w /wheels -c /src/constraints.txt -C cmake.define.MEGARL_CUDA=ON /src pycosat \
    && grep -E '^(megatron-core|transformers|math-verify)==' /src/constraints.txt > /wheels/constraints.txt

FROM nvcr.io/nvidia/pytorch:${NGC}
RUN --mount=type=bind,from=wheels,source=/wheels,target=/wheels pip install --no-cache-dir \
    -c /wheels/constraints.txt --find-links /wheels "$(echo /wheels/megarl_core-*.whl)[train,sql]"
