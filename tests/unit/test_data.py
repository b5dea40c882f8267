"""Data sets as users have them become rows of ours; every row is accounted for, and real files come out with the right counts."""

import gzip
import json
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest

from stages import arrow, config_check, data, plan
from stages.errors import UserError

SHARED = Path(__file__).parents[3] / "shared" / "data"
CHAT = [{"role": "user", "content": "how is it?"}, {"role": "assistant", "content": "good."}]
LONGER = [*CHAT, {"role": "user", "content": "and the zip?"}, {"role": "assistant", "content": "sturdy."}]


def made(tmp_path, kind, source, content=None, **options):
    """(rows, facts, what was said) of the data stage on a file with these rows, or on `source` itself."""
    from stages import config_data

    if content is not None:
        (tmp_path / source).write_text("".join(json.dumps(row) + "\n" for row in content))
    section = config_data.Data(kind=kind, source=source, **options)
    params = section.model_dump(exclude_defaults=True) | {"kind": kind, "source": source}
    if (tmp_path / source).is_file():
        params["pin"] = plan._pin(tmp_path, "mine", section)
    said: list[str] = []
    (tmp_path / "out").mkdir(exist_ok=True)
    context = SimpleNamespace(
        params=params, root=tmp_path, work=tmp_path / "work", out=tmp_path / "out", model="mine", facts={}, log=said.append
    )
    data.run(context)
    found = arrow.read(tmp_path / "out" / "data.arrow").to_pylist()
    assert context.facts["rows"] == len(found)
    return found, context.facts, said


def test_messages_become_a_conversation_and_its_last_answer(tmp_path):
    rows, _, _ = made(
        tmp_path, "demonstrations", "a.jsonl", [{"messages": CHAT}, {"messages": [*LONGER, {"role": "user", "content": "ok"}]}]
    )
    assert rows[0] == {"id": "mine-00000000", "prompt": "how is it?", "turns": None, "response": "good."}
    assert (rows[1]["prompt"], rows[1]["turns"], rows[1]["response"]) == ("and the zip?", LONGER[:3], "sturdy.")


def test_sharegpt_is_messages_in_other_words(tmp_path):
    talk = [{"from": "system", "value": "be brief"}, {"from": "human", "value": "how is it?"}, {"from": "gpt", "value": "good."}]
    (row,), _, _ = made(tmp_path, "demonstrations", "a.jsonl", [{"conversations": talk}])
    assert row["turns"] == [{"role": "system", "content": "be brief"}, CHAT[0]] and row["response"] == "good."


def test_pairs_may_be_explicit_conversational_or_implicit(tmp_path):
    bad = {"role": "assistant", "content": "bad."}
    rows, _, _ = made(tmp_path, "preferences", "a.jsonl", [{"prompt": "p", "chosen": "c", "rejected": "r"}])
    assert (rows[0]["prompt"], rows[0]["chosen"], rows[0]["rejected"]) == ("p", "c", "r")
    rows, _, _ = made(tmp_path, "preferences", "b.jsonl", [{"chosen": CHAT, "rejected": [CHAT[0], bad]}])
    assert (rows[0]["prompt"], rows[0]["turns"], rows[0]["chosen"], rows[0]["rejected"]) == ("how is it?", None, "good.", "bad.")
    rows, _, _ = made(tmp_path, "preferences", "c.jsonl", [{"prompt": [CHAT[0]], "chosen": [CHAT[1]], "rejected": [bad]}])
    assert (rows[0]["prompt"], rows[0]["chosen"], rows[0]["rejected"]) == ("how is it?", "good.", "bad.")
    text = "\n\nHuman: how is it?\n\nAssistant: good.\n\nHuman: and the zip?\n\nAssistant:"
    rows, _, _ = made(tmp_path, "preferences", "d.jsonl", [{"chosen": f"{text} sturdy.", "rejected": f"{text} no idea."}])
    assert rows[0]["turns"] == LONGER[:3] and (rows[0]["chosen"], rows[0]["rejected"]) == ("sturdy.", "no idea.")


def test_pairs_of_whole_conversations_beside_a_prompt_are_conversations(tmp_path):
    bad = [CHAT[0], {"role": "assistant", "content": "bad."}]
    (row,), _, _ = made(tmp_path, "preferences", "a.jsonl", [{"prompt": "how is it?", "chosen": CHAT, "rejected": bad}])
    assert (row["prompt"], row["chosen"], row["rejected"]) == ("how is it?", "good.", "bad.")


def test_hh_texts_may_lack_the_first_newlines_and_prompts_may_end_with_the_assistants_name(tmp_path):
    text = "Human: how is it?\n\nAssistant: good.\n\nHuman: and the zip?\n\nAssistant:"
    (row,), _, _ = made(tmp_path, "preferences", "a.jsonl", [{"chosen": f"{text} sturdy.", "rejected": f"{text} no idea."}])
    assert row["turns"] == LONGER[:3] and row["chosen"] == "sturdy."
    (row,), _, _ = made(tmp_path, "prompts", "b.jsonl", [{"prompt": text}])
    assert row["turns"] == LONGER[:3]


def test_a_zero_in_a_template_is_a_zero(tmp_path):
    columns = {"prompt": "{a} plus {b}", "response": "c"}
    rows, _, _ = made(tmp_path, "demonstrations", "a.jsonl", [{"a": 0, "b": 2, "c": 2}], columns=columns)
    assert rows[0]["prompt"] == "0 plus 2"


def test_a_column_that_was_named_must_be_there_though_it_is_optional(tmp_path):
    rows = [{"prompt": "p", "answers": ["a", "b"], "ratings": [1, 2]}]
    with pytest.raises(UserError, match=r"columns\.scores: no column 'ratngs'"):
        made(tmp_path, "preferences", "a.jsonl", rows, columns={"scores": "ratngs"})
    with pytest.raises(ValueError, match=r"columns\.scroes: no field of preferences"):
        made(tmp_path, "preferences", "a.jsonl", rows, columns={"scroes": "ratings"})


def test_ranked_and_scored_answers_become_every_pair_of_different_rank(tmp_path):
    rows, _, _ = made(tmp_path, "preferences", "a.jsonl", [{"prompt": "p", "answers": ["a", "b", "c"]}])
    assert [(r["id"], r["chosen"], r["rejected"]) for r in rows] == [
        ("mine-00000000-0", "a", "b"), ("mine-00000000-1", "a", "c"), ("mine-00000000-2", "b", "c"),
    ]  # fmt: skip
    scored = [{"prompt": "p", "answers": ["a", "b", "c"], "scores": [1.0, 3.0, 1.0]}]
    rows, _, _ = made(tmp_path, "preferences", "b.jsonl", scored)
    assert [(r["chosen"], r["rejected"]) for r in rows] == [("b", "a"), ("b", "c")]


def test_columns_may_be_paths_and_templates(tmp_path):
    row = {"instruction": "add", "instances": [{"input": "1 2", "output": "3"}]}
    columns = {"prompt": "{instruction}\n{instances.0.input}", "response": "instances.0.output"}
    rows, _, _ = made(tmp_path, "demonstrations", "a.jsonl", [row], columns=columns)
    assert (rows[0]["prompt"], rows[0]["response"]) == ("add\n1 2", "3")


def test_every_row_that_is_left_out_is_counted_by_reason_and_said(tmp_path):
    rows = [
        {"prompt": "p", "chosen": "c", "rejected": "r"}, {"prompt": "", "chosen": "c", "rejected": "r"},
        {"prompt": "p", "chosen": "c", "rejected": "c "}, {"prompt": "p", "chosen": None, "rejected": "r"},
    ]  # fmt: skip
    found, facts, said = made(tmp_path, "preferences", "a.jsonl", rows)
    assert len(found) == 1 and facts["seen"] == 4
    assert facts["drops"] == {"chosen equals rejected": 1, "empty chosen": 1, "empty prompt": 1}
    assert "1 rows from 4" in said[0] and "1 chosen equals rejected" in said[0]


@pytest.mark.parametrize(
    ("kind", "rows", "said"),
    [
        ("demonstrations", [{"messages": [CHAT[0]]}], "1 no assistant turn"),
        ("demonstrations", [{"messages": [{"role": "wizard", "content": "x"}]}], "unknown role 'wizard'"),
        ("preferences", [{"chosen": CHAT, "rejected": CHAT}], "chosen equals rejected"),
        ("preferences", [{"chosen": LONGER, "rejected": [{"role": "user", "content": "else"}, CHAT[1]]}], "no prompt in common"),
        ("preferences", [{"prompt": "p", "answers": ["a", "a"]}], "no two answers of different rank"),
        ("rated", [{"prompt": "p", "response": "r", "label": "perhaps"}], "neither true nor false"),
        ("demonstrations", [{"prompt": "p", "chosen": "c", "rejected": "r"}], "no column 'response'"),
        ("rated", [{"prompt": "p", "response": "r"}], "no column 'label'"),
        ("rated", [{"prompt": "p", "response": "r", "label": 5}], "neither true nor false"),
        ("preferences", [{"prompt": "p", "answers": [{"text": "a"}, {"text": "b"}]}], "answer is not one text"),
        ("preferences", [{"prompt": "p", "response": "r"}], "wants prompt, chosen, rejected; or chosen, rejected; or prompt, answers"),
    ],
)
def test_a_data_set_of_which_nothing_is_left_says_why(tmp_path, kind, rows, said):
    with pytest.raises(UserError) as caught:
        made(tmp_path, kind, "a.jsonl", rows)
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_a_sample_is_drawn_by_its_seed(tmp_path):
    rows = [{"text": f"t{i}"} for i in range(100)]
    ids = lambda **options: [r["id"] for r in made(tmp_path, "texts", "a.jsonl", rows, rows=10, **options)[0]]
    assert ids() == [f"mine-{i:08d}" for i in range(10)]
    assert ids(sample=True, seed=1) == ids(sample=True, seed=1) != ids(sample=True, seed=2)


def test_a_mixture_takes_its_shares_each_row_once(tmp_path):
    folders = {}
    for name, count in (("a", 100), ("b", 50)):
        folders[name] = tmp_path / name
        folders[name].mkdir()
        arrow.write(folders[name] / "data.arrow", arrow.DATA["texts"], [{"id": f"{i}", "text": f"{name}{i}"} for i in range(count)])
    params = {"kind": "texts", "mixture": {"a": 3.0, "b": 1.0}, "rows": 40, "seed": 0}
    context = SimpleNamespace(params=params, model="mix", facts={}, log=print, out=tmp_path, input=lambda name: folders[name])
    data.run(context)
    found = arrow.read(tmp_path / "data.arrow")["id"].to_pylist()
    assert Counter(i.split("/")[0] for i in found) == {"a": 30, "b": 10} and len(set(found)) == 40
    with pytest.raises(UserError, match="225 rows of 'a' are wanted and it has 100"):
        data.run(SimpleNamespace(**vars(context) | {"params": params | {"rows": 300}}))


@pytest.mark.parametrize(
    ("section", "said"),
    [
        ({"mixture": {"demos": 1, "heldout": 1}}, "'heldout' holds preferences; wanted demonstrations"),
        ({"mixture": {"demo": 1}}, "did you mean 'demos'"),
        ({"mixture": {"demos": 1}, "source": "a.jsonl"}, "take source and its options out"),
        ({"sample": True}, "give rows too"),
    ],
)
def test_a_wrong_mixture_is_one_line(section, said):
    import yaml

    raw = yaml.safe_load((Path(__file__).parents[2] / "config/config.yaml").read_text())
    raw["data"]["mix"] = {"kind": "demonstrations", **section}
    with pytest.raises(UserError) as caught:
        config_check.load(raw)
    assert said in str(caught.value) and "\n" not in str(caught.value)


def linked(tmp_path, name):
    if not SHARED.is_dir():
        pytest.skip("the shared data sets are not here")
    (tmp_path / name).symlink_to(SHARED / name)
    return name


def test_hh_harmless_pairs_are_implicit_and_of_several_turns(tmp_path):
    source = linked(tmp_path, "hh-harmless-base-test.jsonl.gz")
    rows, facts, _ = made(tmp_path, "preferences", source, rows=200)
    with gzip.open(SHARED / source, "rt") as file:
        theirs = [json.loads(line) for line, _ in zip(file, range(200))]
    assert facts["seen"] == 200 == len(rows) + sum(facts["drops"].values())
    assert len(rows) >= 190
    assert sum(r["turns"] is not None for r in rows) > 100
    by_id = {r["id"]: r for r in rows}
    for i, pair in enumerate(theirs):
        row = by_id.get(f"mine-{i:08d}")
        if row is not None:
            assert pair["chosen"].rstrip().endswith(row["chosen"]) or row["chosen"] in pair["chosen"]
            assert pair["chosen"].count("\n\nHuman:") >= len([t for t in row["turns"] or [{"role": "user"}] if t["role"] == "user"])


def test_gsm8k_is_questions_and_answers(tmp_path):
    source = linked(tmp_path, "gsm8k-test.jsonl")
    rows, facts, _ = made(tmp_path, "demonstrations", source, columns={"prompt": "question", "response": "answer"})
    assert len(rows) == 1319 and not facts["drops"] and all("####" in r["response"] for r in rows)
    prompts, _, _ = made(tmp_path, "prompts", source, columns={"prompt": "question", "reference": "answer"})
    assert prompts[0]["reference"].endswith("18")


def test_self_instruct_demonstrations_come_from_nested_columns(tmp_path):
    source = linked(tmp_path, "self_instruct-seed_tasks.jsonl")
    columns = {"prompt": "{instruction}\n\n{instances.0.input}", "response": "instances.0.output"}
    rows, facts, _ = made(tmp_path, "demonstrations", source, columns=columns)
    assert len(rows) + sum(facts["drops"].values()) == 175 and len(rows) >= 170
    assert {r["id"] for r in rows} <= {f"seed_task_{i}" for i in range(175)}


def test_mt_bench_asks_its_first_question(tmp_path):
    source = linked(tmp_path, "mt_bench-questions.jsonl")
    rows, _, _ = made(tmp_path, "prompts", source, columns={"prompt": "turns", "id": "question_id"})
    by_id = {r["id"]: r["prompt"] for r in rows}
    assert len(rows) == 80 and by_id["81"].startswith("Compose an engaging travel blog post")
