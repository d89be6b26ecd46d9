#!/usr/bin/env bash
# Pack what measuring needs besides torch, transformers, peft and accelerate, for a machine that can't install anything:
# Linux x86-64 with Python 3.12 and CUDA 13. Unpack there and put the folder on PYTHONPATH; about 14 MB, 65 MB unpacked.
#   benchmarks/pack_packages.sh packages.tar.xz
# There, before anything that takes long:  PYTHONPATH=src:FOLDER python3 -c "import pronghorn.models.lora, benchmarks.step"
set -euo pipefail
out=$(realpath -m "$1")
work=$(mktemp -d) && trap 'rm -rf "$work"' EXIT
packages=(
  trl==1.15.0 datasets==4.8.5 dill==0.4.1 multiprocess==0.70.19 pydantic==2.14.3 pydantic_core==2.50.4 annotated_types==0.8.0
  typing-inspection==0.4.5 gguf==0.19.0 bitsandbytes==0.50.2 torchao==0.18.0 fla-core==0.6.0 liger-kernel==0.8.5
  unsloth==2026.10.9 unsloth_zoo==2026.10.9 cut_cross_entropy==25.1.1 tyro==1.0.17 msgspec==0.22.0 xformers==0.0.35
  docstring_parser==0.18.0 typeguard==4.6.0 structlog==26.1.0 json5==0.17.3 nest-asyncio==1.6.0
)
platforms=()
for glibc in 2_39 2_35 2_34 2_31 2_28 2_27 2_24 2_17; do platforms+=(--platform "manylinux_${glibc}_x86_64"); done
platforms+=(--platform manylinux2014_x86_64 --platform manylinux1_x86_64)
for package in "${packages[@]}"; do
  python3 -m pip download -q --no-deps --only-binary=:all: --python-version 3.12 --implementation cp "${platforms[@]}" -d "$work/wheels" "$package"
done
for wheel in "$work"/wheels/*.whl; do unzip -qo "$wheel" -d "$work/site" -x 'studio/*' || [ $? -eq 11 ]; done # none of those files
# libraries of other CUDA versions, which no step loads
find "$work/site/bitsandbytes" -name 'libbitsandbytes*' ! -name '*cuda130*' ! -name '*cpu*' -delete
rm -f "$work"/site/torchao/_C_cutlass_90a.abi3.so
mkdir -p "$(dirname "$out")"
tar cJf "$out" -C "$work/site" .
ls -la "$out"
