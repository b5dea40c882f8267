"""The `rlhf` command."""

from __future__ import annotations

import contextlib
import errno
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


_FILES = Annotated[list[Path] | None, typer.Option("--configfile", help="Merged over config/config.yaml, as snakemake does.")]
_SET = Annotated[str, typer.Option("--set", help="ppo.kl_coef=0.1,..., as in snakemake's --config set=.")]
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


def _planned(files: list[Path] | None, assignments: str):
    from stages import config_check, configuration
    from stages.plan import Plan

    return Plan(config_check.load(configuration.merged(files or [], assignments)), Path.cwd())


@app.command()
def explain(
    artifact: Annotated[str, typer.Argument(help="A target (model, sweep, compare); with OTHER also a run or a folder of results/store.")],
    other: Annotated[str, typer.Argument(help="Another one: print why the two differ.")] = "",
    configfile: _FILES = None,
    set_: _SET = "",
) -> None:
    """What a run would do, and why; or why two artifacts differ: parameters, code modules, packages, inputs."""
    from rich import print as show

    from stages import explain, manifest
    from stages.config_check import nearest
    from stages.resolve import Resolution
    from stages.store import open_store
    from stages.targets import targets

    planned, root = _planned(configfile, set_), Path.cwd()
    if other:
        one, two = (manifest.read(explain.find(name, planned, root)) for name in (artifact, other))
        show(explain.differences(one, two, open_store(str(root)), root))
        return
    known = targets(planned)
    name = artifact.removesuffix("_final")
    if name not in known:
        raise UserError(f"{artifact}: no such target{nearest(name, known)}")
    resolution = Resolution(planned, [known[name]], root)
    resolution.settle(dry=True)
    show(explain.pending(resolution, known[name]))


@app.command()
def lineage(
    artifact: Annotated[str, typer.Argument(help="A model, a run (default/ppo) or a folder of results/store.")],
    everything: Annotated[bool, typer.Option("--all", help="Show every iteration.")] = False,
    configfile: _FILES = None,
    set_: _SET = "",
) -> None:
    """What an artifact was made from, down to the data: keys, seeds, pins, versions, durations."""
    from rich import print as show

    from stages import explain
    from stages.store import open_store

    root = Path.cwd()
    folder = explain.find(artifact, _planned(configfile, set_), root)
    show(explain.tree_of(folder, open_store(str(root)), root, everything=everything))


@app.command()
def score(
    source: Annotated[str, typer.Argument(help="FILE.py:FUNCTION, http(s)://..., or a finished reward model: a model, run or folder.")],
    data: Annotated[Path | None, typer.Option(help="JSON lines with prompt, response and perhaps reference.")] = None,
    prompt: Annotated[str, typer.Option(help="One prompt, with --response, instead of a file.")] = "",
    response: Annotated[str, typer.Option()] = "",
    reference: Annotated[str | None, typer.Option(help="What the response should be, for functions that read it.")] = None,
    configfile: _FILES = None,
    set_: _SET = "",
) -> None:
    """Try a source of reward by itself; a line for each response, and mean and spread."""
    import json
    import statistics

    from stages import rewards, sources

    if data is not None:
        try:
            texts = [{"prompt": r["prompt"], "response": r["response"], "reference": r.get("reference")}
                     for r in map(json.loads, data.read_text().splitlines())]  # fmt: skip
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(f"{data}: not JSON lines with prompt and response ({type(error).__name__}: {error})") from None
    else:
        texts = [{"prompt": prompt, "response": response, "reference": reference}]
    if not texts:
        raise UserError(f"{data}: empty")
    root = Path.cwd()
    if sources.is_model(source):
        from stages import explain
        from stages.score import by_model

        scores = by_model(explain.find(source, _planned(configfile, set_), root) / "model", texts)
    else:
        scores = rewards.ask(source, texts, root=root, progress=lambda line: print(f"rlhf: {line}", file=sys.stderr))
    for text, value in zip(texts, scores):
        print(f"{value:10.4f}  {text['prompt']!r} -> {text['response']!r}")
    if len(scores) > 1:
        print(f"{len(scores)} responses, mean {statistics.fmean(scores):.4f}, std {statistics.stdev(scores):.4f}")


def _progress(items, what, total):
    from rich.console import Console
    from rich.progress import track

    return track(items, what, total=total, console=Console(stderr=True), disable=not sys.stderr.isatty())


@app.command()
def verify() -> None:
    """Hash everything in the cache and in results/store again; put damaged files into quarantine."""
    from stages import upkeep
    from stages.store import open_store

    root = Path.cwd()
    store = open_store(str(root))
    faults = upkeep.verify(store, root, _progress)
    for fault in faults:
        print(fault)
    print(
        f"{len(store.objects())} objects are whole"
        + (f"; {len(faults)} findings: run snakemake to make good what is missing" if faults else "")
    )
    raise SystemExit(bool(faults))


@app.command()
def gc(
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    dry_run: Annotated[bool, typer.Option("-n", "--dry-run", help="Only tell.")] = False,
    configfile: _FILES = None,
    set_: _SET = "",
) -> None:
    """Free optimizer states that something continues from, and results that no pointer, no run and no configuration names."""
    from rich.filesize import decimal

    from stages import locks, upkeep
    from stages.resolve import Resolution
    from stages.store import open_store

    root = Path.cwd()
    store = open_store(str(root))
    planned = _planned(configfile, set_)
    with contextlib.nullcontext() if dry_run else locks.alone(root):
        resolution = Resolution(planned, [], root, planned.nodes.values())
        found = upkeep.garbage(store, root, {f.key for f in resolution.found.values() if f.key})
        for key, record in found.results.items():
            m = record["manifest"]
            print(f"result {key[:12]}: {m['model']}, {m['stage']}, {decimal(sum(e['size'] for e in m['outputs'].values()))}")
        if found.trims:
            print(f"optimizer states of {len(found.trims)} artifacts that a later one continues: {decimal(found.optimizer_bytes)}")
        if not (found.objects or found.folders or found.results):
            print("nothing to free: everything is named by a pointer or a run")
            return
        print(f"{len(found.objects)} objects, {decimal(found.object_bytes)} in all")
        if dry_run and locks.in_use(root):
            print("a workflow is running here: what it has made and nothing names yet is counted too; gc would not free it now")
        if not dry_run and (yes or typer.confirm("Free them?")):
            upkeep.collect(store, found)
            print(f"freed {decimal(found.object_bytes)}")


@app.command()
def freeze(
    target: Annotated[str, typer.Argument(help="A finished target: a model, a sweep, compare.")],
    output: Annotated[Path, typer.Option(help="File to write (default: <target>.freeze.yaml).")] = Path(),
) -> None:
    """Write one file from which `rlhf rerun` makes the same run elsewhere."""
    import yaml

    from stages import freeze, manifest
    from stages.store import open_store

    root = Path.cwd()
    frozen = freeze.freeze(target.removesuffix("_final"), open_store(str(root)), root)
    path = output if output != Path() else Path(f"{frozen['target']}.freeze.yaml")
    manifest.write_text(
        path, "# Made by `rlhf freeze`; `rlhf rerun` with this file makes the same run again.\n" + yaml.safe_dump(frozen, sort_keys=False)
    )
    print(f"{path}: {len(frozen['artifacts'])} artifacts, code {frozen['code']['revision'][:12]}")


@app.command()
def rerun(
    file: Annotated[Path, typer.Argument(help="What `rlhf freeze` wrote.")],
    cores: Annotated[str, typer.Option(help="As snakemake's --cores.")] = "all",
) -> None:
    """Make a frozen run again and compare every artifact's key and bytes with those it had."""
    import subprocess

    import yaml

    from stages import config_check, configuration, freeze, manifest
    from stages.plan import Plan
    from stages.store import open_store

    try:
        frozen = yaml.safe_load(file.read_text())
        target = frozen["target"]
    except (OSError, yaml.YAMLError, KeyError, TypeError):
        raise UserError(f"{file}: not a file of `rlhf freeze`") from None
    for note in freeze.notes(frozen):
        print(f"rlhf: note: {note}", file=sys.stderr)
    raw, root = freeze.configuration(frozen, configuration.merged([])), Path.cwd()
    planned = Plan(config_check.load(raw), root)
    path = Path("results/work") / f"rerun-{target}.yaml"
    manifest.write_text(path, yaml.safe_dump(raw, sort_keys=False))
    command = [sys.executable, "-m", "snakemake", "--snakefile", str(configuration.DEFAULT.parents[1] / "workflow/Snakefile"),
               "--workflow-profile", str(configuration.DEFAULT.parents[1] / "workflow/profiles/default"), "--directory", ".",
               "--cores", cores, f"{target}_final" if target in planned.final else target,
               "--replace-workflow-config", "--configfile", str(path)]  # fmt: skip
    if subprocess.run(command).returncode:
        raise SystemExit(1)
    faults = freeze.compare(frozen, planned, open_store(str(root)), root)
    for fault in faults:
        print(fault)
    print(f"{len(frozen['artifacts'])} artifacts: {len(frozen['artifacts']) - len(faults)} with the same key and the same bytes")
    raise SystemExit(bool(faults))


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
    sys.setrecursionlimit(100_000)  # iterations by the thousand, one made from the other
    try:
        app()
    except UserError as error:
        print("rlhf: error:", "; ".join(str(error).splitlines()), file=sys.stderr)
        raise SystemExit(1) from None
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        print(f"rlhf: error: {Path.cwd()}: no disk space left; free some and run the same command again", file=sys.stderr)
        raise SystemExit(1) from None
