"""How long the probe of a generic family takes before its first step: a model of some 8B that no family's file knows.

    python -m benchmarks.probe_cost --out probe-cost.json

The model is a StarCoder 2 of about Llama-3.1-8B's sizes with random weights in bfloat16, made on the device, with LoRA
r16. The probe runs three times, each from the beginning: the first also compiles and warms up. Ends with code 1 where
documents mix or a probe takes more than `--most` seconds.
"""

from __future__ import annotations

import argparse

from benchmarks.program import parser_of, run, show
from benchmarks.record import Facts

SIZES = {
    "hidden_size": 4096,
    "intermediate_size": 21504,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "sliding_window": None,
}
RUNS = 3


def arguments() -> argparse.ArgumentParser:
    """Declare the program's arguments."""
    parser = parser_of(__doc__)
    parser.add_argument("--most", type=float, default=3.0, metavar="SECONDS", help="that a probe may take")
    parser.add_argument("--tiny", action="store_true", help="try the program on a small model")
    return parser


def main(given: argparse.Namespace) -> bool:
    """Time the probes; tell whether documents stay apart and each was fast enough."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from benchmarks.candidates.base import device
    from pronghorn.models.attach import attach
    from pronghorn.models.lora import add_lora
    from pronghorn.models.probe import probe

    sizes = {**SIZES, "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128, "vocab_size": 128}
    torch.manual_seed(0)
    with Facts(given) as facts:
        with torch.device(device()):
            config = AutoConfig.for_model("starcoder2", **(sizes if given.tiny else SIZES))
            model = add_lora(AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)).train()
        attach(model)
        found = [probe(model) for _ in range(RUNS)]
        facts |= {"parameters": sum(p.numel() for p in model.parameters()), "most_s": given.most}
        facts |= {"seconds": [each.seconds for each in found], "clean": all(each.clean for each in found)}
        facts |= {"found": [str(each) for each in found]}
    show([{"probe": n, "seconds": f"{each.seconds:.2f}", "found": str(each)} for n, each in enumerate(found, 1)])
    return all(each.clean and each.seconds <= given.most for each in found)


if __name__ == "__main__":
    run(arguments, main)
