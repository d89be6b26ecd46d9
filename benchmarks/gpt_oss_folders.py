"""Write gpt-oss with random weights in 4 bits, as OpenAI publishes it (MXFP4) and as Unsloth does (bitsandbytes' NF4).

    python -m benchmarks.gpt_oss_folders --shape gpt-oss-20b --checkpoints DIR

writes DIR/gpt-oss-20b-mxfp4, which Pronghorn and transformers load, and DIR/gpt-oss-20b-nf4 in the layout of
`unsloth/gpt-oss-20b-unsloth-bnb-4bit`: each expert's two matrices apart, in NF4 with nested scales, all else in bf16.
Weights are made on the device; those of the two folders are not the same numbers.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.candidates.base import device
from benchmarks.program import parser_of, run
from benchmarks.random_weights import generated
from pronghorn.diagnose.shapes import BOS, EOS, PAD, byte_tokenizer, shape_of
from pronghorn.errors import ConfigError
from pronghorn.loading.packed_checkpoint import PackedSkeleton
from pronghorn.loading.skeleton import without_weights
from pronghorn.state import new_folder

MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.mlp.router"]}
NF4: dict[str, Any] = {
    "quant_method": "bitsandbytes",
    "load_in_4bit": True,
    "bnb_4bit_quant_type": "nf4",
    "bnb_4bit_use_double_quant": True,
    "bnb_4bit_compute_dtype": "bfloat16",
    "llm_int8_skip_modules": ["embed_tokens", "self_attn", "router", "lm_head"],
}
SHARD_BYTES = 2**31


def config_of(shape: dict[str, Any], **more: Any) -> Any:
    """Make a shape's configuration."""
    from transformers import AutoConfig

    return AutoConfig.for_model(**shape, bos_token_id=BOS, eos_token_id=EOS, pad_token_id=PAD, **more)


def in_mxfp4(shape: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a checkpoint whose experts are in MXFP4."""
    expected = PackedSkeleton.of(config_of(shape, quantization_config=MXFP4), torch.bfloat16).expected()
    for stored in generated(expected, device=device()):
        yield stored.name, stored.read()


def in_nf4(shape: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a checkpoint whose experts are apart, each quantised to NF4."""
    from bitsandbytes.functional import quantize_4bit

    model = without_weights(config_of(shape), torch.bfloat16, None)
    for stored in generated(dict(model.named_parameters()), device=device()):
        name, _, last = stored.name.rpartition(".")
        if name.endswith("router"):
            yield f"{name}.linear.{last}", stored.read()
        elif not name.endswith("experts"):
            yield stored.name, stored.read()
        else:
            linear, kind = last.removesuffix("_bias"), "bias" if last.endswith("_bias") else "weight"
            for expert in range(stored.shape[0]):
                key, own = f"{name}.{linear}s.{expert}.{kind}", stored.rows(expert, expert + 1)[0]
                if kind == "weight":
                    own, state = quantize_4bit(own.T.contiguous(), quant_type="nf4", compress_statistics=True)
                    yield from ((f"{key}.{part}", tensor) for part, tensor in state.as_dict(packed=True).items())
                yield key, own


def write(folder: Path, shape: dict[str, Any], tensors: Iterator[tuple[str, Tensor]], stored: dict[str, Any]) -> None:
    """Write a checkpoint in shards, whole or not at all."""
    from safetensors.torch import save_file

    with new_folder(folder) as unfinished:
        weights: dict[str, str] = {}
        shard: dict[str, Tensor] = {}

        def finish() -> None:
            file = f"model-{len(set(weights.values())) + 1:05}.safetensors"
            save_file(shard, unfinished / file, {"format": "pt"})
            weights.update(dict.fromkeys(shard, file))
            shard.clear()

        for name, tensor in tensors:
            shard[name] = tensor.cpu()
            if sum(part.nbytes for part in shard.values()) > SHARD_BYTES:
                finish()
        finish()
        (unfinished / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weights}))
        config = config_of(shape)
        config.architectures = ["GptOssForCausalLM"]
        config.save_pretrained(unfinished)
        file = unfinished / "config.json"
        table = json.loads(file.read_text()) | {"dtype": "bfloat16", "quantization_config": stored}
        file.write_text(json.dumps(table, indent=1))
        byte_tokenizer(config.max_position_embeddings).save_pretrained(unfinished)


def arguments() -> argparse.ArgumentParser:
    """Declare the program's arguments."""
    parser = parser_of(__doc__)
    parser.add_argument("--shape", default="gpt-oss-20b", help="gpt-oss-20b, gpt-oss-120b or tiny-gpt-oss")
    parser.add_argument(
        "--checkpoints", type=Path, required=True, metavar="DIR", help="written below, if not there yet"
    )
    return parser


def main(given: argparse.Namespace) -> None:
    """Write what isn't there yet."""
    shape = shape_of(given.shape)
    if shape is None or shape["model_type"] != "gpt_oss":
        raise ConfigError(f"--shape {given.shape} is not a gpt-oss", "use gpt-oss-20b, gpt-oss-120b or tiny-gpt-oss")
    given.checkpoints.mkdir(parents=True, exist_ok=True)
    for name, make, stored in (("mxfp4", in_mxfp4, MXFP4), ("nf4", in_nf4, NF4)):
        folder = given.checkpoints / f"{given.shape}-{name}"
        if not folder.is_dir():
            write(folder, shape, make(shape), stored)
        print(folder)


if __name__ == "__main__":
    run(arguments, main)
