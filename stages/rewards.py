"""Scores of sampled responses from every source of reward: models of the graph, Python functions, HTTP services.

A source that fails, answers short or answers no number fails the rule and names itself and the prompts; 0.0 is a score.
"""

from __future__ import annotations

import http.client
import json
import math
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from stages import manifest
from stages.cluster.rows import Rows
from stages.errors import UserError
from stages.sources import SECRET, is_function, is_service

_BATCH = 64
"""Responses in one request to a service."""
_TRIES, _TIMEOUT_S = 4, 60.0


def score(context, rollouts: Sequence[dict[str, Any]], policy: Path, precision: str) -> dict[str, list[float]]:
    """Source -> a raw score for each rollout, in their order. policy: the model folder that sampled them."""
    texts = [{"prompt": r["turns"] or r["prompt"], "response": r["text"], "reference": r.get("reference")} for r in rollouts]
    secrets = context.runtime.get("secrets", {})
    found = {}
    for entry in context.params["rewards"]:
        name = entry["source"]
        if "input" in entry:
            found[name] = _check(name, by_model(context, entry["input"], rollouts, policy, precision), texts)
        else:
            found[name] = ask(name, texts, root=context.root, pin=entry.get("pin"), progress=context.log, secrets=secrets)
    return found


def by_model(context, name: str, rollouts: Sequence[dict[str, Any]], policy: Path, precision: str) -> list[float]:
    """Scores of the reward model that is input `name`: of the sampled tokens, or, with another tokenizer, of the text.

    rollouts: {prompt, turns, text, prompt_ids, response_ids, finish_reason}.
    """
    from stages.cluster.groups import source as weights

    folder, sequences = context.model_folder(name), [(r["prompt_ids"], r["response_ids"]) for r in rollouts]
    if not context.cluster.apply("stages.tokens:same", one=str(folder), other=str(policy)):
        context.log(f"{context.job['inputs'][name]} has another tokenizer: it scores the text of the responses")
        rows = [{"id": str(i), "prompt": r["prompt"], "turns": r["turns"], "response": r["text"] or " "} for i, r in enumerate(rollouts)]
        sequences = context.cluster.apply("stages.tokens:retold", folder=str(folder), rows=rows,
                                          finished=[r["finish_reason"] == "stop" for r in rollouts])  # fmt: skip
    model = weights(context, name, "scorer", precision=precision)
    return [float(s[0]) for s in context.cluster.score("reward", model, Rows.of(sequences, last_only=True), select="at")]


def combined(context, scores: dict[str, list[float]], normalisation: str) -> list[float]:
    """The weighted sum over sources. normalisation `model`: each model's scores less its stored mean, by its stored spread."""
    totals = [0.0] * len(next(iter(scores.values())))
    for entry in context.params["rewards"]:
        mean, std = 0.0, 1.0
        if normalisation == "model" and "input" in entry:
            facts = manifest.read(context.input(entry["input"]))["facts"]
            mean, std = facts["mean"], facts["std"]
        totals = [t + entry["weight"] * (s - mean) / std for t, s in zip(totals, scores[entry["source"]])]
    return totals


def ask(source: str, texts: Sequence[dict[str, Any]], *, root: Path, pin: str | None = None,
        progress: Callable[[str], None] = lambda line: None, secrets: Mapping[str, str] = os.environ) -> list[float]:  # fmt: skip
    """Scores by a function or a service. texts: {prompt, response, reference} each; a prompt of several turns is their list.

    secrets: values of `${NAME}` in an address, put in for the request and shown nowhere. Raises UserError when it fails.
    """
    if is_function(source):
        scores = _call(source, texts, root, pin)
    elif is_service(source):
        scores = []
        for start in range(0, len(texts), _BATCH):
            scores += _post(source, texts[start : start + _BATCH], progress, secrets)
    else:
        raise UserError(f"{source}: neither FILE.py:FUNCTION nor an http(s) address")
    return _check(source, scores, texts)


def _check(source: str, scores: Any, texts: Sequence[dict[str, Any]]) -> list[float]:
    if not isinstance(scores, list) or len(scores) != len(texts):
        got = f"{len(scores)} scores" if isinstance(scores, list) else type(scores).__name__
        raise UserError(f"reward {source}: {got} for {len(texts)} responses, the first to {_shown(texts[0])}; one number each is wanted")
    for value, text in zip(scores, texts):
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise UserError(f"reward {source}: {value!r} for the response to {_shown(text)}; a finite number is wanted (0.0 is one)")
    return [float(s) for s in scores]


def _shown(text: dict[str, Any]) -> str:
    prompt = str(text["prompt"])
    return repr(prompt if len(prompt) <= 60 else prompt[:57] + "...")


def _call(source: str, texts: Sequence[dict[str, Any]], root: Path, pin: str | None) -> Any:
    """The function in a process of its own: whatever it does, it does not do it to the cluster."""
    file, _, name = source.partition(":")
    path = root / file
    if not path.is_file():
        raise UserError(f"reward {source}: no file '{file}'")
    if pin is not None and manifest.hash_file(path) != pin:
        raise UserError(f"reward {source}: '{file}' changed while the workflow ran; run it again")
    command = [sys.executable, "-m", "stages.reward_function", str(path), name]
    asked = {key: [t[key] for t in texts] for key in ("prompt", "response", "reference")}
    done = subprocess.run(command, input=json.dumps(asked), capture_output=True, text=True, cwd=root)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise UserError(f"reward {source}: failed on {len(texts)} responses, the first to {_shown(texts[0])}: {reason}")
    if not done.stdout.strip():
        raise UserError(f"reward {source}: ended without an answer")
    return json.loads(done.stdout.splitlines()[-1])


def _post(url: str, texts: Sequence[dict[str, Any]], progress: Callable[[str], None], secrets: Mapping[str, str]) -> list[float]:
    missing = [name for name in SECRET.findall(url) if name not in secrets]
    if missing:
        raise UserError(f"reward {url}: the environment variable {missing[0]} is not set")
    address = SECRET.sub(lambda match: secrets[match[1]], url)
    body = json.dumps({f"{key}s": [t[key] for t in texts] for key in ("prompt", "response", "reference")}).encode()
    for attempt in range(1, _TRIES + 1):
        try:
            request = urllib.request.Request(address, body, {"Content-Type": "application/json"})
            with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as answer:
                found = json.loads(answer.read())
            break
        except urllib.error.HTTPError as error:
            reason = f"HTTP {error.code} {error.reason}"
            final = error.code < 500 and error.code != 429  # our own fault: asking again will not help
        except (OSError, ValueError, http.client.HTTPException) as error:
            reason, final = str(getattr(error, "reason", error)) or type(error).__name__, False
        if final or attempt == _TRIES:
            raise UserError(f"reward {url}: {reason}, after {attempt} tries; responses to {_shown(texts[0])} and {len(texts) - 1} more")
        progress(f"reward {url}: {reason}; asking again ({attempt} of {_TRIES - 1})")
        time.sleep(0.5 * 2 ** (attempt - 1))
    rewards = found.get("rewards") if isinstance(found, dict) else found
    return _check(url, rewards, texts)
