"""A conversation of several turns is trained on the assistant's words, end-of-text included, and on nothing else."""

import pytest

from stages import tokens
from stages.cluster.rows import Rows
from stages.errors import UserError

TURNS = [
    {"role": "user", "content": "how is the tent?"}, {"role": "assistant", "content": "the tent is light."},
    {"role": "user", "content": "and the zip?"},
]  # fmt: skip
ROWS = [
    {"id": "a", "prompt": "how is the lamp?", "turns": None, "response": "it shines."},
    {"id": "b", "prompt": "and the zip?", "turns": TURNS, "response": "the zip sticks."},
]


def test_every_assistant_turn_is_trained_and_no_other_token(tied):
    found = tokens.dialogues(str(tied), ROWS)
    tokenizer = tokens._tokenizer(str(tied))
    of = dict(zip(found["ids"], zip(found["tokens"], found["chosen"])))
    trained = lambda name: tokenizer.decode([t for t, c in zip(*of[name]) if c]).replace(" ", "")
    eos = tokenizer.eos_token
    assert trained("a") == f"itshines.{eos}"
    assert trained("b") == f"thetentislight.{eos}thezipsticks.{eos}"


def test_a_single_turn_is_the_same_either_way(tied):
    found = tokens.dialogues(str(tied), ROWS[:1])
    chat = tokens.conversations(str(tied), ROWS[:1], answers=("response",))
    one, other = Rows.masked(found["tokens"], found["chosen"]), Rows.of(list(zip(chat["prompts"], chat["response"])))
    assert (one.tokens_T == other.tokens_T).all() and (one.chosen_T == other.chosen_T).all()


def test_a_conversation_longer_than_the_context_is_left_out_and_counted(tied):
    found = tokens.dialogues(str(tied), ROWS, context=24)
    assert found["ids"] == ["a"] and found["drops"] == {"longer than the context": 1}
    with pytest.raises(UserError, match=r"of 1 rows none is left.*longer than the context"):
        tokens.dialogues(str(tied), ROWS[1:], context=24)


def test_prompts_may_be_turns(tied):
    text, turns = tokens.prompts(str(tied), ["and the zip?", TURNS], ["a", "b"], room=4)
    assert len(turns) > len(text) and turns[-len(text) + 1 :] == text[1:]
