"""Importing changes nothing, and costs nothing until something is used."""

from __future__ import annotations

import importlib
import pkgutil
import subprocess
import sys
import textwrap

import pytest

import pronghorn

MODULES = sorted(module.name for module in pkgutil.walk_packages(pronghorn.__path__, "pronghorn."))


def run(script: str) -> str:
    """Run a script in a fresh interpreter and return what it printed."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_import_loads_no_torch() -> None:
    loaded = run(
        """
        import sys
        before = set(sys.modules)
        import pronghorn
        dir(pronghorn), pronghorn.__version__
        print(*sorted({name.split(".")[0] for name in set(sys.modules) - before}))
        """
    ).split()
    assert not {"torch", "transformers", "peft", "trl", "datasets", "numpy", "pydantic"} & set(loaded)


def test_import_takes_less_than_0_3_seconds() -> None:
    """Of the processor's time, whatever else the machine does."""
    script = """
        import time
        start = time.process_time()
        import pronghorn
        print(time.process_time() - start)
        """
    assert float(run(script)) < 0.3


def test_every_public_name_resolves() -> None:
    assert len(pronghorn.__all__) == len(set(pronghorn.__all__))
    for name in pronghorn.__all__:
        assert getattr(pronghorn, name) is not None
        assert name in dir(pronghorn)
    assert pronghorn.FastLanguageModel is importlib.import_module("pronghorn.api").FastLanguageModel
    with pytest.raises(AttributeError, match="no attribute 'FastestLanguageModel'"):
        _ = pronghorn.FastestLanguageModel


def test_importing_every_module_patches_nothing() -> None:
    """Foreign attributes, environment, logging, registries, generators, CUDA: all as they were."""
    run(
        f"""
        import importlib, inspect, logging, os, random, signal, sys, warnings
        # everything a module of ours may import, first
        import accelerate, datasets, peft, torch, transformers, trl
        import torch.nn.functional, torch.distributed, torch.utils.data, torch.utils.checkpoint
        import transformers.models.llama.modeling_llama, transformers.models.qwen3.modeling_qwen3
        import transformers.models.gemma3.modeling_gemma3, transformers.modeling_flash_attention_utils
        import transformers.integrations.sdpa_attention, transformers.masking_utils
        import trl.trainer.sft_trainer, peft.tuners.lora, transformers.trainer, transformers.trainer_utils
        for optional in ("bitsandbytes", "gguf", "matplotlib", "rich", "typer", "pydantic", "yaml"):
            try:
                importlib.import_module(optional)
            except ImportError:
                pass

        WATCHED = [
            torch, torch.nn, torch.nn.functional, torch.nn.Module, torch.Tensor, torch.autograd, torch.optim,
            torch.cuda,            torch.utils.checkpoint, torch.distributed, torch.backends.cuda, torch.nn.Linear,
            transformers.models.llama.modeling_llama,
            transformers.models.llama.modeling_llama.LlamaForCausalLM,
            transformers.models.llama.modeling_llama.LlamaModel,
            transformers.models.llama.modeling_llama.LlamaDecoderLayer,
            transformers.models.llama.modeling_llama.LlamaAttention,
            transformers.models.qwen3.modeling_qwen3, transformers.models.gemma3.modeling_gemma3,
            transformers.PreTrainedModel, transformers.Trainer, transformers.trainer, transformers.masking_utils,
            transformers.modeling_flash_attention_utils, transformers.integrations.sdpa_attention,
            trl.SFTTrainer, trl.trainer.sft_trainer, peft.PeftModel, peft.tuners.lora, peft.tuners.lora.Linear,
            accelerate.Accelerator, datasets.Dataset,
        ]

        def attributes():
            found = {{}}
            for owner in WATCHED:
                for name in dir(owner):
                    value = inspect.getattr_static(owner, name, None)
                    if not inspect.ismodule(value):
                        found[repr(owner)[:80], name] = (id(value), value)
            return found

        def rest():
            root = logging.getLogger()
            handlers = {{name: list(getattr(logger, "handlers", [])) for name, logger in root.manager.loggerDict.items()
                        if not name.startswith("pronghorn")}}
            return {{
                "environment": dict(os.environ),
                "root handlers": list(root.handlers),
                "root level": root.level,
                "handlers": handlers,
                "excepthook": id(sys.excepthook),
                "path": list(sys.path),
                "warnings": list(warnings.filters),
                "signals": [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)],
                "torch generator": torch.get_rng_state().tolist(),
                "generator": random.getstate(),
                "threads": torch.get_num_threads(),
                "dtype": torch.get_default_dtype(),
                "deterministic": torch.are_deterministic_algorithms_enabled(),
                "tf32": (torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32),
                "matmul": torch.get_float32_matmul_precision(),
                "grad": torch.is_grad_enabled(),
                "verbosity": transformers.utils.logging.get_verbosity(),
                "distributed": torch.distributed.is_initialized(),
            }}

        attributes()  # looking makes some lazy attributes
        attributes_before, rest_before = attributes(), rest()
        for name in {MODULES!r}:
            if not name.endswith("__main__"):
                importlib.import_module(name)
        attributes_after, rest_after = attributes(), rest()

        changed = [key for key, (identity, _) in attributes_before.items()
                   if key not in attributes_after or attributes_after[key][0] != identity]
        added = [key for key in attributes_after if key not in attributes_before]
        assert not changed and not added, (changed, added)
        for key, value in rest_before.items():
            assert rest_after[key] == value, (key, value, rest_after[key])
        from transformers import AttentionInterface
        from transformers.masking_utils import AttentionMaskInterface
        for registry in (AttentionInterface, AttentionMaskInterface):
            names = list(registry().valid_keys()) + list(registry._global_mapping)
            assert len(names) > 3 and not [name for name in names if "pronghorn" in name], names
        assert not torch.cuda.is_initialized()
        assert not [name for name in dir(torch.ops) if "pronghorn" in name]
        """
    )


def test_light_modules_stay_light() -> None:
    """The command line reads a recipe and packs integers before it needs torch."""
    loaded = run(
        """
        import sys
        import pronghorn.config.recipe, pronghorn.data.packing, pronghorn.errors
        print(*sorted({name.split(".")[0] for name in sys.modules}))
        """
    ).split()
    assert not {"torch", "transformers", "peft", "trl", "datasets", "matplotlib"} & set(loaded)
