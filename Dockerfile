# Pronghorn with CUDA: torch's wheels bring CUDA's libraries, the host its driver (NVIDIA Container Toolkit).
#   docker build -t pronghorn .
#   docker run --gpus all --rm -it --user "$(id -u):$(id -g)" -v "$PWD:/work" -v "$HOME/.cache:/cache" pronghorn train recipe.yaml
# TORCH takes another build: --build-arg TORCH="torch==2.13.0 --index-url URL"
FROM python:3.12-slim
ARG TORCH=torch==2.13.0
# Triton compiles a small C file per kernel
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
RUN pip install --no-cache-dir ${TORCH}
COPY pyproject.toml README.md LICENSE /source/
COPY docs /source/docs
COPY recipes /source/recipes
COPY src /source/src
RUN pip install --no-cache-dir "/source[nf4,gguf]" && rm -rf /source
# Who runs the image may have no account in it, so no home that can be written to. Models and kernels are kept in
# /cache, from which the next container takes them if the host's folder is there
RUN mkdir -m 1777 /cache
ENV HF_HOME=/cache/huggingface TRITON_CACHE_DIR=/cache/triton TORCHINDUCTOR_CACHE_DIR=/cache/inductor
WORKDIR /work
ENTRYPOINT ["pronghorn"]
CMD ["doctor"]
