"""Stand in for `python -m vllm.entrypoints.openai.api_server`: a stub server with transformers' model behind it."""

from __future__ import annotations

import sys
import time
from pathlib import Path

TESTS = Path(__file__).parents[1]


def main(arguments: list[str]) -> None:
    """Serve what the arguments name; without the adapter, or not at all, if the first one says so."""
    fault, module, name, *rest = arguments
    assert (module, name) == ("-m", "vllm.entrypoints.openai.api_server")
    if fault == "fails":
        sys.exit("No module named vllm")
    import torch

    from support.served import Stub, serving, trained

    torch.set_num_threads(1)  # the tests' own number does not come along
    flags = [part for part in rest if part == "--enforce-eager" or part == "--enable-lora"]
    values = [part for part in rest if part not in flags]
    told = dict(zip(values[::2], values[1::2], strict=True))
    assert told["--dtype"] == "float32" and int(told["--max-model-len"]) > 0
    model, served = Path(told["--model"]), "tiny"
    if "--enable-lora" in flags:
        assert (model / "config.json").is_file() and int(told["--max-lora-rank"]) >= 8
        served, _, folder = told["--lora-modules"].partition("=")
        model = model if fault == "base" else Path(folder)
        assert folder == told["--tokenizer"]
    engine = trained(model)
    if fault == "base":
        engine.tokenizer = trained(Path(folder)).tokenizer
    with serving(Stub(engine, name=served), int(told["--port"])):
        time.sleep(600)


if __name__ == "__main__":
    sys.path[:0] = [str(TESTS), str(TESTS.parent / "src")]
    main(sys.argv[1:])
