"""Text to token ids by the model's own chat template, with the checks that every row must pass before it is used.

Runs on a trainer rank (through Groups.apply), where transformers is loaded.
"""

from __future__ import annotations

import sys
from collections import Counter
from typing import Any

from stages.errors import UserError


def _tokenizer(folder: str):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    if not tokenizer.chat_template:
        raise UserError(f"{folder}: the tokenizer has no chat template; give one (models.<name>.template: FILE)")
    if tokenizer.eos_token_id is None or tokenizer.pad_token_id in (None, tokenizer.eos_token_id):
        raise UserError(f"{folder}: the tokenizer needs an end-of-text token and a padding token of its own (models.<name>.pad_token)")
    return tokenizer


_PADS = ("<|finetune_right_pad_id|>", "<pad>", "[PAD]", "<|pad|>", "<|reserved_special_token_0|>", "<unk>")
"""Tokens that models leave for padding, or for nobody, most fitting first."""


def complete(folder: str, *, template: str | None, pad_token: str | None) -> None:
    """Give a tokenizer what it lacks: a chat template, a padding token of its own. Raises UserError for a token it has not."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    lacking = tokenizer.pad_token_id in (None, tokenizer.eos_token_id)
    vocabulary = tokenizer.get_vocab()
    if pad_token is None and lacking:
        pad_token = next((token for token in _PADS if token in vocabulary and token != tokenizer.eos_token), None)
    if pad_token is not None and pad_token not in vocabulary:
        raise UserError(f"pad_token: '{pad_token}' is not in the vocabulary of {folder}")
    if template is None and pad_token is None:
        return
    tokenizer.chat_template = template or tokenizer.chat_template
    tokenizer.pad_token = pad_token or tokenizer.pad_token
    tokenizer.save_pretrained(folder)


def same(one: str, other: str) -> bool:
    """Whether two model folders turn text and chats into the same ids."""
    a, b = _tokenizer(one), _tokenizer(other)
    return a.chat_template == b.chat_template and a.backend_tokenizer.to_str() == b.backend_tokenizer.to_str()


def special(folder: str) -> dict[str, int]:
    """Ids of the end-of-text and padding tokens, and the longest sequence of the model, in tokens."""
    from transformers import AutoConfig

    tokenizer, config = _tokenizer(folder), AutoConfig.from_pretrained(folder).get_text_config()
    return {"eos": tokenizer.eos_token_id, "pad": tokenizer.pad_token_id, "context": config.max_position_embeddings}


def prompts(folder: str, asked: list[str | list[dict]], ids: list[str], *, room: int, limit: int | None = None) -> list[list[int]]:
    """Prompt ids, ending where the response begins. asked: texts, or turns that end with the user.

    `room` tokens must be left for the response within the model's context, and within `limit`, the engines' longest sequence.

    Raises UserError naming the first row that does not fit, or that has not exactly one beginning-of-text.
    """
    from transformers import AutoConfig

    tokenizer = _tokenizer(folder)
    context = min(limit or sys.maxsize, AutoConfig.from_pretrained(folder).get_text_config().max_position_embeddings)
    rendered = [_rendered(tokenizer, row, one) for row, one in zip(ids, asked)]
    found = tokenizer(rendered, add_special_tokens=False).input_ids if rendered else []
    for row, tokens in zip(ids, found):
        _check_bos(tokenizer, row, tokens)
        if len(tokens) + room > context:
            raise UserError(
                f"prompt {row}: {len(tokens)} tokens and room for {room} more exceed the context of {context}; "
                "shorten it, lower sampling.max_tokens, or raise hardware.engines.max_model_len if the model's context is longer"
            )
    return found


def conversations(folder: str, rows: list[dict[str, str]], *, answers: tuple[str, ...], context: int | None = None,
                  strict: bool = True) -> dict[str, Any]:  # fmt: skip
    """Prompt and response ids of each answer column, end-of-text included; rows that must go are counted by reason.

    rows: with `id`, `prompt` and the answer columns. Returns {"ids", "prompts", <answer>..., "drops": {reason: count}}.
    Raises UserError when nothing is left, or when prompt ids are no prefix of the whole.
    """
    from transformers import AutoConfig

    tokenizer = _tokenizer(folder)
    context = context or AutoConfig.from_pretrained(folder).get_text_config().max_position_embeddings
    drops: Counter[str] = Counter()
    given, rows = len(rows), _accepted(tokenizer, rows, drops)
    heads = tokenizer([_render(tokenizer, _asked(row)) for row in rows], add_special_tokens=False).input_ids
    wholes = {a: tokenizer([_render(tokenizer, _asked(row), row[a]) for row in rows], add_special_tokens=False).input_ids for a in answers}
    kept: dict[str, Any] = {"ids": [], "prompts": [], **{a: [] for a in answers}}
    for i, row in enumerate(rows):
        head, tails = heads[i], {}
        _check_bos(tokenizer, row["id"], head)
        for a in answers:
            whole = wholes[a][i]
            if whole[: len(head)] != head:
                raise UserError(f"row {row['id']}: the chat template's prompt is no prefix of prompt and response; fix the template")
            tail = whole[len(head) :]
            if tokenizer.eos_token_id not in tail:
                raise UserError(f"row {row['id']}: the chat template does not end a response with {tokenizer.eos_token}; fix the template")
            tails[a] = tail[: tail.index(tokenizer.eos_token_id) + 1]
        if any(not row[a].strip() for a in answers):
            drops["empty response"] += 1
        elif any(len(head) + len(tail) > context for tail in tails.values()):
            drops["longer than the context"] += 1
        elif len(answers) == 2 and tails[answers[0]] == tails[answers[1]]:
            drops["chosen equals rejected"] += 1
        else:
            kept["ids"].append(row["id"])
            kept["prompts"].append(head)
            for a in answers:
                kept[a].append(tails[a])
    if strict and not kept["ids"]:
        raise UserError(f"of {given} rows none is left: {dict(drops) or 'the data set is empty'}")
    return kept | {"drops": dict(drops)}


def retold(folder: str, rows: list[dict[str, Any]], *, finished: list[bool]) -> list[tuple[list[int], list[int]]]:
    """(prompt ids, response ids) of texts that another tokenizer's model wrote; no end-of-text where it had not ended.

    Responses longer than the context are cut from behind. Raises UserError for a prompt that fills the context.
    """
    tokenizer, limit = _tokenizer(folder), special(folder)["context"]
    encode = lambda texts: tokenizer(texts, add_special_tokens=False).input_ids
    heads = encode([_render(tokenizer, _asked(row)) for row in rows])
    wholes = encode([_render(tokenizer, _asked(row), row["response"]) for row in rows])
    found = []
    for row, head, whole, done in zip(rows, heads, wholes, finished):
        if len(head) >= limit:
            raise UserError(f"response {row['id']}: its prompt has {len(head)} tokens for the reward model, whose context is {limit}")
        tail = whole[len(head) :]
        end = tail.index(tokenizer.eos_token_id) + done if tokenizer.eos_token_id in tail else len(tail)
        found.append((head, tail[: max(1, end)][: limit - len(head)]))
    return found


def dialogues(folder: str, rows: list[dict[str, Any]], *, context: int | None = None) -> dict[str, Any]:
    """Whole conversations with the tokens that are trained: those of every assistant turn, its end-of-text included.

    rows: as in `conversations`, with one answer column, `response`. Returns {"ids", "tokens", "chosen", "drops"}.
    """
    single = [row for row in rows if not any(t["role"] == "assistant" for t in row.get("turns") or [])]
    kept: dict[str, Any] = {"ids": [], "tokens": [], "chosen": []}
    drops: Counter[str] = Counter()
    if single:
        chat = conversations(folder, single, answers=("response",), context=context, strict=len(single) == len(rows))
        kept["ids"], drops = chat["ids"], Counter(chat["drops"])
        kept["tokens"] = [[*p, *r] for p, r in zip(chat["prompts"], chat["response"])]
        kept["chosen"] = [[False] * len(p) + [True] * len(r) for p, r in zip(chat["prompts"], chat["response"])]
    several = [row for row in rows if any(t["role"] == "assistant" for t in row.get("turns") or [])]
    if several:
        tokenizer = _tokenizer(folder)
        limit = context or special(folder)["context"]
        for row in _accepted(tokenizer, several, drops):
            tokens, chosen = _spans(tokenizer, row)
            if len(tokens) > limit:
                drops["longer than the context"] += 1
                continue
            kept["ids"].append(row["id"])
            kept["tokens"].append(tokens)
            kept["chosen"].append(chosen)
    if not kept["ids"]:
        raise UserError(f"of {len(rows)} rows none is left: {dict(drops)}")
    return kept | {"drops": dict(drops)}


def _spans(tokenizer, row: dict) -> tuple[list[int], list[bool]]:
    """Token ids of a conversation of several assistant turns, and which belong to one of them."""
    turns = [*row["turns"], {"role": "assistant", "content": row["response"]}]
    encode = lambda text: tokenizer(text, add_special_tokens=False).input_ids
    tokens = encode(_template(tokenizer, turns, False))
    _check_bos(tokenizer, row["id"], tokens)
    chosen, end = [False] * len(tokens), 0
    for k, turn in enumerate(turns):
        if turn["role"] != "assistant":
            continue
        head = encode(_template(tokenizer, turns[:k], True))
        if tokens[: len(head)] != head:
            raise UserError(f"row {row['id']}: the chat template's prompt is no prefix of prompt and response; fix the template")
        if tokenizer.eos_token_id not in tokens[len(head) :]:
            raise UserError(f"row {row['id']}: the chat template does not end a response with {tokenizer.eos_token}; fix the template")
        end = tokens.index(tokenizer.eos_token_id, len(head)) + 1
        chosen[len(head) : end] = [True] * (end - len(head))
    return tokens[:end], chosen[:end]


def plain(folder: str, texts: list[str], *, context: int, remarks: bool = False) -> list[list[int]]:
    """Whole texts with beginning and end of text; longer ones are cut into pieces of the context's length.

    remarks: a text of several lines is a conversation of the embedded world and what is said of it: user, assistant, and,
    after the end of text, the rest.
    """
    tokenizer = _tokenizer(folder)
    rendered = []
    for text in texts:
        lines = text.split("\n") if remarks else [text]
        if len(lines) == 1:
            rendered.append(f"{tokenizer.bos_token} {text}{tokenizer.eos_token}" if tokenizer.bos_token else text + tokenizer.eos_token)
        else:
            rest = " " + " ".join(lines[2:]) if lines[2:] else ""
            rendered.append(_render(tokenizer, lines[0], lines[1]) + rest)
    found = []
    for ids in tokenizer(rendered, add_special_tokens=False).input_ids:
        found += [ids[i : i + context] for i in range(0, len(ids), context) if len(ids[i : i + context]) > 1]
    return found


def texts(folder: str, responses: list[list[int]]) -> list[str]:
    """Responses as text, without special tokens."""
    return [t.strip() for t in _tokenizer(folder).batch_decode(responses, skip_special_tokens=True)]


def _asked(row: dict) -> str | list[dict]:
    return row.get("turns") or row["prompt"]


class _Refused(Exception):
    """The chat template has no words for these turns."""


def _render(tokenizer, prompt: str | list[dict], response: str | None = None) -> str:
    turns = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    if response is not None:
        turns.append({"role": "assistant", "content": response})
    return _template(tokenizer, turns, response is None)


def _template(tokenizer, turns: list[dict], ask: bool) -> str:
    import jinja2

    try:
        return tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=ask)
    except jinja2.TemplateError as error:
        raise _Refused(str(error)) from None


def _rendered(tokenizer, row: str, prompt: str | list[dict]) -> str:
    try:
        return _render(tokenizer, prompt)
    except _Refused as error:
        raise UserError(f"row {row}: the chat template refuses its turns: {error}") from None


def _accepted(tokenizer, rows: list[dict], drops: Counter) -> list[dict]:
    """Rows that the chat template has words for; the others are counted."""
    kept = []
    for row in rows:
        try:
            if row.get("turns"):
                _render(tokenizer, row["turns"])
            kept.append(row)
        except _Refused:
            drops["turns that the chat template refuses"] += 1
    return kept


def _check_bos(tokenizer, row: str, ids: list[int]) -> None:
    bos = tokenizer.bos_token_id
    if bos is not None and bos != tokenizer.eos_token_id and ids.count(bos) > 1:
        raise UserError(f"row {row}: {ids.count(bos)} beginning-of-text tokens; one comes from the chat template, take the others out")
