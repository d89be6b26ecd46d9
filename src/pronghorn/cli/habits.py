"""What people type who know other tools: their commands and options, and what to write here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from typer.core import TyperCommand

from pronghorn.cli.errors import full_disk_told

_CALLED = {
    "--help": "help",
    "--version": "version",
    "chat": "inference generate predict ui webui webchat",
    "convert": "llamafactory-cli axolotl",
    "data inspect": "preprocess tokenize inspect",
    "docs": "man",
    "doctor": "env",
    "export": "merge merge-lora serve vllm-serve api",
    "export RUN --push OWNER/NAME": "upload push",
    "export RUN --to gguf": "quantize",
    "init": "config",
    "init --recipe list": "fetch recipes",
    "plan": "estimate",
    "train": "sft finetune fine-tune resume accelerate torchrun run lora qlora",
    "verify": "eval evaluate",
}
COMMANDS = {name: ours for ours, names in _CALLED.items() for name in names.split()}
"""Commands of other tools, and ours."""
_OF_RECIPES = {
    "--set": "changes follow the recipe without an option: train.max_steps=3",
    "--cpu": "CUDA_VISIBLE_DEVICES= in the environment hides the GPUs",
    "--config -c": "the recipe is given without an option: pronghorn train my.yaml",
    "--model-name -m": "model.name=NAME, behind the recipe",
    "--data": "data.train=FILE, behind the recipe",
    "--dataset-name": "data.train=NAME, behind the recipe",
    "--deepspeed": "all GPUs are used; launch.strategy=sharded shares the layers among them",
    "--device": "CUDA_VISIBLE_DEVICES in the environment chooses GPUs; empty it hides them all",
    "--do-train": "leave it out: pronghorn train trains",
    "--do-eval --eval": "data.eval=5% holds some of the data out and measures their loss",
    "--dry-run": "pronghorn plan and pronghorn data inspect look without training",
    "--force --yes -y": "--overwrite begins a finished run anew",
    "--gpu": "--gpus counts those of train; plan and init take --device rtx4090",
    "--gpu-memory --memory": "plan takes --device 24GiB; memory.budget=20GiB limits a run",
    "--hub-model-id --push-to-hub": "pronghorn export RUN --push OWNER/NAME, after training",
    "--launcher": "leave it out: pronghorn train starts a process for each GPU",
    "--log-level --verbose -v": "--paths tells every decision, --debug an error's traceback",
    "--merge --save-merged": "pronghorn export RUN, after training",
    "--num-gpus --num-processes --nproc-per-node": "--gpus counts them; without it all are used",
    "--quantize": "model.load_in_4bit=true trains over 4 bits; pronghorn export RUN --to gguf quantises the result",
    "--quiet": "what is told goes to stdout: add > run.log",
    "--stage": "leave it out: rows of answers or texts are recognised; for dpo: pronghorn docs preference-training",
    "--use-peft": "leave it out: adapter.method is lora unless it is set to full",
    "-o": "train.output=DIR says where a run goes",
    "--resume --resume-from-checkpoint": "the same command goes on with an unfinished run",
    "--bf16": "precision.dtype=bfloat16, which is the default on a GPU that has it",
    "--fp16": "precision.dtype=float16",
    "--packing": "leave it out: packing.enabled=true is the default",
    "--use-4bit --qlora": "model.load_in_4bit=true",
    "--lora": "leave it out: adapter.method=lora is the default",
    "--wandb": "train.report_to=wandb",
}
"""Options of other tools to commands that take a recipe, and what to do here."""
_OF_COMMANDS = {
    "export": {
        "--merge": "leave it out: --to merged is the default",
        "--output-dir -o": "--output DIR",
        "--repo --repo-id --hub-model-id --push-to-hub": "--push OWNER/NAME",
        "--token": "HF_TOKEN in the environment",
        "--format --gguf": "--to gguf",
    },
    "chat": {
        "--prompt -p": 'echo "…" | pronghorn chat RUN',
        "--adapter": "the run's or adapter's folder is given without an option: pronghorn chat RUN",
        "--max-tokens": "--max-new-tokens 256",
    },
    "init": {
        "--output -o": "the recipe's name is given without an option: pronghorn init mine.yaml",
        "--dataset -d": "--data FILE",
        "-m": "--model NAME",
        "--gpu": "--device rtx4090",
        "--template": "--recipe NAME; --recipe list lists them",
    },
    "convert": {
        "-o": "--output RECIPE",
        "--config": "the file is given without an option: pronghorn convert FILE",
    },
    "plan": {"--html": "it writes no page; --json prints the plan for programs"},
    "verify": {"--html": "it writes no page; --json prints the verdict for programs"},
    "bench": {"--html": "it writes no page; its table is printed"},
}
"""The same of single commands."""
_ALONE = {
    "chat": 'questions come from the terminal or a pipe: echo "…" | pronghorn chat RUN',
    "doctor": "it looks at the machine; pronghorn plan RECIPE looks at a recipe",
    "init": "data are named by --data FILE, a model by --model NAME",
}
"""What to do instead of giving a command a further argument."""
_NO_SUCH, _BAD_VALUE = "NoSuchOption", "BadParameter"
"""Classes of errors of the parser, by name: which library typer takes them from changes with its version."""


class Answering(TyperCommand):
    """A command that answers other tools' options with its own."""

    @full_disk_told()
    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Return what is left after the options.

        Raises:
            UsageError: an unknown option or argument, with what to write instead.
        """
        given = list(args)
        try:
            return super().parse_args(ctx, args)
        except Exception as error:
            kind, option = type(error).__name__, getattr(error, "option_name", None)
            if kind == _NO_SUCH and option and (what := self.instead(option, given)) is not None:
                ctx.fail(f"No such option: {option}{what}")
            if kind == "UsageError" and "unexpected extra argument" in str(error) and ctx.info_name in _ALONE:
                ctx.fail(f"{error}; {_ALONE[ctx.info_name]}")
            if kind == _BAD_VALUE and getattr(getattr(error, "param", None), "name", "") == "gpus":
                usual = "all are used, CUDA_VISIBLE_DEVICES=0,1 chooses some"
                without = "it plans for one" if self.name == "plan" else usual
                ctx.fail(f"--gpus takes a number, at least 1; without it {without}")
            raise

    def instead(self, option: str, given: Sequence[str]) -> str | None:
        """Return how the answer to an unknown option goes on, None where nothing is known of it."""
        return _told(_OF_COMMANDS.get(self.name or "", {}), option)


class OfRecipe(Answering):
    """A command that takes a recipe: an unknown option that is a key's name is answered with the key."""

    def instead(self, option: str, given: Sequence[str]) -> str | None:
        """Return how the answer to an unknown option goes on, None where nothing is known of it."""
        if (what := super().instead(option, given) or _told(_OF_RECIPES, option)) is not None:
            return what
        written = _override(option, given)
        return written and f". A recipe's keys are set without dashes: {written}"


def _told(table: Mapping[str, str], option: str) -> str | None:
    """Return what a table says of an option, None where it doesn't name it."""
    name = option.replace("_", "-")
    return next((f"; {what}" for names, what in table.items() if name in names.split()), None)


def _override(option: str, given: Sequence[str]) -> str | None:
    """Return the override that an unknown option stands for, None where it is not a key's name."""
    from pronghorn.config.habits import ALIASES
    from pronghorn.config.recipe import fields

    name = option.lstrip("-").replace("-", "_")
    kinds = {key: kind for key, kind, *_ in fields()}
    named = (key for key in kinds if name in (key, key.partition(".")[2]))
    key = ALIASES.get(name) if name not in kinds else name
    key = key if key in kinds else next(named, None)
    at = next(i for i, word in enumerate(given) if word.split("=")[0] == option)
    follows = [word for word in given[at + 1 : at + 2] if not word.startswith("-") and word.split("=")[0] not in kinds]
    switch = key is not None and ("bool" in kinds[key] or key == "memory.gradient_checkpointing")
    value = given[at].partition("=")[2] or (follows[0] if follows else "true" if switch else "VALUE")
    return key and f"{key}={value}"
