"""`pronghorn launch`: a batch script for a cluster, written and shown, never submitted."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from pronghorn.cli.console import Console
from pronghorn.cli.options import Overrides, RecipeFile, write_new
from pronghorn.errors import ConfigError

SCRIPT = """\
#!/bin/bash
#SBATCH --job-name={name}
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node={gpus}
#SBATCH --time={time}
#SBATCH --signal=TERM@120
#SBATCH --requeue
#SBATCH --output={name}-%j.log

# Two minutes before the time is over Slurm sends SIGTERM: a checkpoint is saved. Submitted again, the same script goes
# on from it. Add your cluster's own lines (partition, account, modules) here.
export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export OMP_NUM_THREADS=8
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=110  # seconds that torchrun waits for that checkpoint
exec srun --kill-on-bad-exit=1 torchrun --nnodes={nodes} --nproc-per-node={gpus} --max-restarts=0 \\
  --rdzv-id="$SLURM_JOB_ID" --rdzv-backend=c10d --rdzv-endpoint="$MASTER_ADDR:29500" \\
  -m pronghorn train {arguments}
"""


def launch(
    recipe: RecipeFile,
    overrides: Overrides = None,
    slurm: Annotated[bool, typer.Option("--slurm", help="Write a batch script for Slurm.")] = False,
    gpus: Annotated[int | None, typer.Option(min=1, help="GPUs of each machine. By default launch.gpus.")] = None,
    nodes: Annotated[int | None, typer.Option(min=1, help="Number of machines. By default launch.nodes.")] = None,
    time: Annotated[str, typer.Option(help="Time limit of the job, as Slurm writes it.")] = "24:00:00",
    output: Annotated[
        Path | None, typer.Option(metavar="FILE", help="File to write. By default beside the recipe.")
    ] = None,
) -> None:
    """Write and show a batch script that trains RECIPE on a cluster. Nothing is submitted.

    On one machine you don't need it: `pronghorn train` starts a process for each GPU by itself.

    [bold]Examples[/]

      pronghorn launch --slurm my.yaml --gpus 8 --nodes 2

      pronghorn launch --slurm my.yaml --gpus 4 --time 02:00:00 train.gradient_accumulation_steps=16
    """
    from pronghorn.config.checks import share_of_step
    from pronghorn.config.recipe import Recipe

    if not slurm:
        raise ConfigError(
            "pronghorn launch writes batch scripts, and Slurm's is the one it knows",
            "add --slurm; on one machine call pronghorn train, which uses all its GPUs",
        )
    settings = Recipe.load(recipe, overrides or [])
    path = output or recipe.with_suffix(".sbatch")
    count = gpus or (settings.launch.gpus if isinstance(settings.launch.gpus, int) else None)
    if count is None:
        raise ConfigError(
            "how many GPUs a machine of the cluster has is not known here", "give --gpus N, or set launch.gpus"
        )
    machines = nodes or settings.launch.nodes
    share_of_step(settings, count * machines)  # refused here, before it waits in a queue
    arguments = shlex.join([str(recipe), *(overrides or [])])
    text = SCRIPT.format(name=_job_name(recipe), nodes=machines, gpus=count, time=time, arguments=arguments)
    if not (path.is_file() and path.read_bytes() == text.encode()):
        write_new(path, text, "it has other lines: name another file by --output, or move it")
    console = Console(highlight=False)
    console.print(escape(text), soft_wrap=True)
    console.print(
        f"[bold]Written to[/] {escape(str(path))}. Submit it by: sbatch {escape(shlex.quote(str(path)))}",
        soft_wrap=True,
    )


def _job_name(recipe: Path) -> str:
    return "".join(c if c.isalnum() or c in "-_." else "-" for c in recipe.stem) or "pronghorn"
