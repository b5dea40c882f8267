"""The `rlhf` command."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from stages.errors import UserError

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="What the workflow calls, and what you ask of it by hand.",
)
cluster = typer.Typer(no_args_is_help=True, help="The local Ray head, its engines and trainer ranks.")
app.add_typer(cluster, name="cluster")


_JOBS = Annotated[str, typer.Argument(help="File that snakemake wrote: results/work/jobs/*.tsv.")]


@app.command()
def run(artifact: Annotated[str, typer.Argument(help="Folder of the artifact below results/store.")], jobs: _JOBS) -> None:
    """Make an artifact, or restore it (rules call this)."""
    from stages.client import run as submit
    from stages.jobs import read

    runtime, job = read(jobs, "runtime", artifact)
    raise SystemExit(submit(job, runtime))


@app.command()
def report(target: Annotated[str, typer.Argument(help="A target of the workflow, without `_final`.")], jobs: _JOBS) -> None:
    """Write the tables of a target (rules call this)."""
    from stages.jobs import read
    from stages.report import run as write

    write(*read(jobs, f"report/{target}"))


@app.command()
def track(pointer: Annotated[str, typer.Argument(help="`<model>-<plan id>`.")], jobs: _JOBS) -> None:
    """Write DVC's pointer to a finished model (rules call this)."""
    from stages.jobs import read
    from stages.pointers import write

    write(*read(jobs, f"track/{pointer}"))


@app.command("config")
def config_(
    write: Annotated[bool, typer.Option("--write", help="Write config/README.md and workflow/schemas/config.json.")] = False,
) -> None:
    """Explain every key of the configuration, with its default."""
    from stages import config_docs

    if write:
        config_docs.write(Path("."))
    else:
        print(config_docs.readme())


@cluster.command()
def up(
    port: Annotated[int, typer.Option(help="Port of the head; 0 takes a free one.")] = 0,
    idle_minutes: Annotated[int, typer.Option(help="Stop after so long without work.")] = 30,
) -> None:
    """Start the local head, if none is there."""
    from stages.cluster import head

    print(head.up(port=port or None, idle_minutes=idle_minutes).address)


@cluster.command()
def status() -> None:
    """Engines and trainer ranks: node, memory, what they hold, since when."""
    from stages.cluster.status import print_status

    raise SystemExit(print_status())


@cluster.command()
def down() -> None:
    """End the local head and all that runs on it; nothing that we did not start."""
    from stages.cluster import head

    print("stopped" if head.down() else "no local head is running")


def main() -> None:
    try:
        app()
    except UserError as error:
        print("rlhf: error:", "; ".join(str(error).splitlines()), file=sys.stderr)
        raise SystemExit(1) from None
