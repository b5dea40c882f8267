"""A reward model tried by itself on this machine, with transformers alone: no cluster, no workflow."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stages.errors import UserError


def by_model(folder: Path, texts: Sequence[dict[str, Any]]) -> list[float]:
    """A score for each {prompt, response}, read at the end of the answered chat. Raises UserError for what is no reward model."""
    import torch
    from transformers import AutoConfig, AutoModelForSequenceClassification
    from transformers.utils import logging

    from stages.tokens import conversations

    logging.disable_progress_bar()
    config = AutoConfig.from_pretrained(folder)
    if not any("SequenceClassification" in name for name in config.architectures or []):
        raise UserError(f"{folder}: holds {', '.join(config.architectures or ['nothing known'])}, no reward model")
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    rows = [{"id": str(i), **text} for i, text in enumerate(texts)]
    chat = conversations(str(folder), rows, answers=("response",))
    if len(chat["ids"]) < len(rows):
        raise UserError(f"{len(rows) - len(chat['ids'])} of {len(rows)} responses cannot be scored: {chat['drops']}")
    with torch.no_grad():
        return [float(model(torch.tensor([[*p, *r]])).logits[0, 0]) for p, r in zip(chat["prompts"], chat["response"])]
