"""Tables of what a target made: results/report/<target>.json, and summary and timings over all that is finished and was judged alike."""

from __future__ import annotations

import json
import os
import statistics
from pathlib import Path
from typing import Any

from stages import arrow, manifest

REPORT = Path("results/report")
COLUMNS = ("model", "gold_reward", "win_rate", "win_rate_se", "response_length", "reward_model_score", "kl")
_SHOWN_PROMPTS = 4


def run(job: dict[str, Any]) -> None:
    """Write a target's report and refresh the common tables; link results/runs/<experiment>/<model>."""
    own = {name: job["evaluations"][name] for name in sorted(job["evaluations"], key=lambda name: name != job["baseline"])}
    rows = [_row(name, Path(path)) | _seconds(job, name) for name, path in own.items()]
    _link(job)
    if job["sweep"]:
        first = {label: name for name, label in reversed(job["sweep"].items())}.values()
        shown = {name: path for name, path in own.items() if name == job["baseline"] or name in first}
        text = _points(rows, job) + "\n" + _summary(rows, job["baseline"], {}, shown)
    else:
        text = _summary(rows, job["baseline"], {}, own)
        _refresh(job)
    manifest.write_text(REPORT / f"{job['target']}.md", text)
    made = {path: manifest.read(Path(path))["content"] for path in own.values()}
    manifest.write_json(REPORT / f"{job['target']}.json", {"rows": rows, "job": job, "made": made})  # the last: then all is there


def _refresh(job: dict[str, Any]) -> None:
    """The common tables: of all targets of the experiment, what is finished and was judged as this target's models are."""
    jobs = [json.loads(p.read_text())["job"] for p in sorted(REPORT.glob("*.json")) if p.name != "summary.json"]
    evaluations, models, iterations, seconds = {}, {}, {}, {}
    for other in [*(j for j in jobs if j["experiment"] == job["experiment"]), job]:
        evaluations |= {n: p for n, p in other["evaluations"].items() if (Path(p) / manifest.NAME).exists()}
        models |= {n: p for n, p in other["models"].items() if (Path(p) / manifest.NAME).exists()}
        iterations |= other["iterations"]
        seconds |= {n: _seconds(other, n) for n in other["evaluations"]}
    setting = {name: _setting(Path(path)) for name, path in evaluations.items()}
    others = sorted(name for name in evaluations if setting[name] != setting[job["baseline"]])
    ordered = sorted(evaluations.keys() - others, key=lambda name: (name != job["baseline"], [*evaluations].index(name)))
    rows = [_row(name, Path(evaluations[name])) | seconds[name] for name in ordered]
    text = _summary(rows, job["baseline"], models, {n: evaluations[n] for n in ordered})
    if others:
        text += f"Not shown, since they were judged by another {job['baseline']}, other prompts or rewards: {', '.join(others)}.\n"
    manifest.write_text(REPORT / "timings.md", _timings(iterations))
    manifest.write_text(REPORT / "summary.md", text)
    manifest.write_json(REPORT / "summary.json", rows)


def _row(name: str, path: Path) -> dict[str, Any]:
    found = json.loads((path / "summary.json").read_text())
    return (
        {"model": name}
        | {column: found[column] for column in COLUMNS[1:]}
        | {"gold_terms": found["gold_terms"], "prompts": found["prompts"]}
    )


def _setting(evaluation: Path) -> list[dict[str, Any]]:
    """What the numbers of an evaluation depend on besides the policy: only those of one setting may stand in one table."""
    made = manifest.read(evaluation)
    inputs = {name: i["content"] for name, i in made["inputs"].items() if name not in ("policy", "baseline")}
    return [inputs, {name: made["params"].get(name) for name in ("rewards", "judge", "sampling", "seed")}]


def _seconds(job: dict[str, Any], model: str) -> dict[str, float | None]:
    """What a model's own artifacts took, without what it was made from: generation, and training with scoring; None if unknown."""
    found: dict[str, float | None] = {"generation_s": 0.0, "training_s": 0.0}
    if "own" not in job:  # a report of earlier code
        return dict.fromkeys(found)
    for path in job["own"].get(model, ()):
        info = _info(Path(path))
        if info is None:
            return {"generation_s": None, "training_s": None}
        phases = info["phases"]
        found["generation_s"] += phases.get("generation", 0.0) + phases.get("weight sync", 0.0)
        found["training_s"] += phases.get("training", 0.0) + phases.get("logits and rewards", 0.0) + phases.get("advantages", 0.0)
    return found


def _info(artifact: Path) -> dict[str, Any] | None:
    """How an artifact was computed, here or where it was restored from."""
    path = artifact / "run_info.json"
    if not path.exists():
        return None
    info = json.loads(path.read_text())
    return info if info["status"] == "computed" else info.get("computed")


def _link(job: dict[str, Any]) -> None:
    """Readable names: results/runs/<experiment>/<model> -> the folder of its weights."""
    runs = Path("results/runs") / job["experiment"]
    runs.mkdir(parents=True, exist_ok=True)
    for name, path in job["models"].items():
        if not (Path(path) / manifest.NAME).exists():
            continue  # an ancestor that nothing needed here
        name = name.removeprefix(f"{job['target']}-") if job["sweep"] else name
        for link, folder in ((name, "model"), (f"{name}-ema", "ema")):
            if (Path(path) / folder).is_dir():
                temporary = runs / f".{link}.{os.getpid()}"
                temporary.symlink_to(os.path.relpath(Path(path) / folder, runs))
                temporary.replace(runs / link)


def table(header: list[str], rows: list[list[str]]) -> str:
    """A Markdown table with its columns aligned, for eyes in a terminal too."""
    widths = [max(len(str(line[i])) for line in [header, *rows]) for i in range(len(header))]
    line = lambda cells: (
        "| " + " | ".join(str(c).ljust(w) if i == 0 else str(c).rjust(w) for i, (c, w) in enumerate(zip(cells, widths))) + " |"
    )
    return "\n".join([line(header), "|" + "|".join("-" * (w + 2) for w in widths) + "|", *map(line, rows)])


def _number(value: float | None, digits: int = 3) -> str:
    text = "" if value is None else f"{value:.{digits}f}"
    return text.lstrip("-") if text and float(text) == 0 else text


def _summary(rows: list[dict], baseline: str, models: dict[str, str], evaluations: dict[str, str]) -> str:
    main = [
        [
            r["model"], _number(r["gold_reward"]),
            "" if r["win_rate"] is None else f"{100 * r['win_rate']:.1f} ± {100 * r['win_rate_se']:.1f} %",
            _number(r["response_length"], 1), _number(r["reward_model_score"], 2), _number(r["kl"], 2),
            _number(r["generation_s"], 0), _number(r["training_s"], 0),
        ]
        for r in rows
    ]  # fmt: skip
    parts = [
        table(["model", "gold reward", f"win rate against {baseline}", "length", "reward model", "KL", "generation s", "training s"], main),
        f"\n{rows[0]['prompts'] if rows else 0} evaluation prompts; ties count half; ± is one standard error; "
        f"KL to {baseline} in nats a response; seconds of a model's own artifacts, training with scoring.",
        "\n## Terms of the gold reward\n",
    ]
    terms = list(rows[0]["gold_terms"]) if rows else []
    if not terms:
        parts.pop()
    else:
        parts.append(table(["model", *terms], [[r["model"], *(_number(r["gold_terms"][t]) for t in terms)] for r in rows]))
    judges = {n: manifest.read(Path(p)) for n, p in models.items()}
    facts = {n: m["facts"] for n, m in judges.items() if m["stage"] == "reward_model"}
    judged = [
        [n, f"{100 * f['accuracy']:.1f} %", f["count"] // 2, _number(f["calibration_error"]), _number(f["mean"]), _number(f["std"])]
        for n, f in facts.items()
    ]
    if judged:
        parts += [
            "\n## Reward models\n",
            table(["model", "right on held-out pairs", "pairs", "calibration error", "mean score", "std"], judged),
        ]
    parts += ["\n## Answers\n", *_answers(evaluations)]
    return "\n".join(parts) + "\n"


def _points(rows: list[dict], job: dict) -> str:
    """A row for each setting of a sweep: means over its seeds, with the standard error of the mean where there are several."""
    groups: dict[str, list[dict]] = {}
    for row in rows:
        if row["model"] in job["sweep"]:
            groups.setdefault(job["sweep"][row["model"]], []).append(row)
    lines = []
    for label, of in groups.items():
        rates = [100 * r["win_rate"] for r in of]
        error = statistics.stdev(rates) / len(rates) ** 0.5 if len(rates) > 1 else 100 * of[0]["win_rate_se"]
        means = {column: statistics.fmean(r[column] for r in of) for column in COLUMNS if of[0][column] is not None and column != "model"}
        shown = [_number(means.get(c), d) for c, d in (("gold_reward", 3), ("reward_model_score", 2), ("kl", 2), ("response_length", 1))]
        lines.append([label, len(of), f"{statistics.fmean(rates):.1f} ± {error:.1f} %", *shown])
    return table(["setting", "seeds", f"win rate against {job['baseline']}", "gold reward", "reward model", "KL", "length"], lines) + (
        "\n\n± is the standard error of the mean over seeds; of one seed, that over prompts.\n\n## Every point\n"
    )


def _answers(evaluations: dict[str, str]):
    samples = {n: {r["prompt_id"]: r for r in arrow.read(Path(p) / "samples.arrow").to_pylist()} for n, p in evaluations.items()}
    ids = sorted(next(iter(samples.values())))[:_SHOWN_PROMPTS] if samples else []
    for prompt in ids:
        yield f"**{next(iter(samples.values()))[prompt]['prompt']}**\n"
        for name, rows in samples.items():
            if prompt in rows:
                by = "gold_reward" if rows[prompt]["gold_reward"] is not None else "score"
                yield f"- {name} ({rows[prompt][by]:.2f}): {rows[prompt]['text']}"
        yield ""


_PHASES = ("generation", "weight sync", "logits and rewards", "advantages", "training", "writing")


def _timings(iterations: dict[str, list[str]]) -> str:
    """Seconds per iteration and phase, as the paper's table of a PPO step; `workflow` is all that lies between them."""
    parts = []
    for model, paths in iterations.items():
        by_iteration: dict[str, list[dict]] = {}
        for path in paths:
            info = Path(path) / "run_info.json"
            if info.exists():
                by_iteration.setdefault(Path(path).parent.name, []).append(json.loads(info.read_text()))
        lines, previous = [], None
        for iteration, infos in sorted(by_iteration.items()):
            infos.sort(key=lambda i: i["started"])
            if any(i["status"] != "computed" for i in infos):
                lines.append([int(iteration), *["restored"] * (len(_PHASES) + 3)])
                previous = None
                continue
            sums = {p: sum(i["phases"].get(p, 0.0) for i in infos) for p in _PHASES}
            begun = previous if previous is not None and infos[0]["started"] - previous < 30 else infos[0]["started"]
            wall = infos[-1]["finished"] - begun
            other = wall - sum(sums.values())
            lines.append([int(iteration), *(f"{sums[p]:.2f}" for p in _PHASES), f"{other:.2f}", f"{other / len(infos):.2f}", f"{wall:.2f}"])
            previous = infos[-1]["finished"]
        parts += [f"## {model}: seconds per iteration\n", table(["iteration", *_PHASES, "workflow", "workflow a rule", "all"], lines), ""]
    return "\n".join(parts) or "no iterations\n"
