"""What a trainer group saves is a whole Hugging Face folder, which says what the group itself says."""

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from stages.cluster.rows import Rows

from .stack import BRADLEY_TERRY, OPTIMIZER, Trained, fresh, same_bytes, sequences

SEQUENCES = sequences(12)
ROWS = Rows.of(SEQUENCES)
LAST = Rows.of(SEQUENCES, last_only=True)
PAIRS = Rows.of(SEQUENCES, per_row=2, last_only=True)


@pytest.fixture(params=[2, 3], ids=lambda stage: f"ZeRO-{stage}")
def group(request, pair):
    with pair.hardware(zero_stage=request.param):
        yield pair


@pytest.mark.parametrize("which", ["tied", "untied"])
def test_a_saved_policy_opens_with_the_same_log_probabilities_and_its_head_tied_or_not_as_before(group, request, which):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    made = group.fit(fresh(request.getfixturevalue(which)), ROWS)
    scored = group.score("actor", made.source, ROWS, select="before")
    model = AutoModelForCausalLM.from_pretrained(made.folder)
    for (prompt, response), ours in zip(SEQUENCES, scored, strict=True):
        logits = model(input_ids=torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
        theirs = logits.log_softmax(-1).gather(-1, torch.tensor(response)[:, None]).squeeze(-1)
        assert torch.allclose(torch.tensor(ours), theirs, rtol=1e-6, atol=1e-6)

    same = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert same == model.config.tie_word_embeddings == (which == "tied")
    assert ("lm_head.weight" in made.weights) == (which == "untied")
    assert model.dtype == torch.float32 and model.config.architectures == ["LlamaForCausalLM"]
    assert AutoTokenizer.from_pretrained(made.folder).chat_template


def test_a_saved_reward_model_opens_with_the_same_scores_and_one_label(group, tied):
    from transformers import AutoModelForSequenceClassification

    made = group.fit(fresh(tied, "scorer", seed=4), PAIRS, BRADLEY_TERRY)
    scored = group.score("actor", made.source, LAST, select="at")
    model = AutoModelForSequenceClassification.from_pretrained(made.folder)
    assert model.config.num_labels == 1 and model.config.architectures == ["LlamaForSequenceClassification"]
    for (prompt, response), ours in zip(SEQUENCES, scored, strict=True):
        assert ours.shape == (1,)
        assert model(input_ids=torch.tensor([prompt + response])).logits.item() == pytest.approx(ours[0], rel=1e-6, abs=1e-6)


def test_a_head_that_a_folder_has_is_never_made_anew(group, reward):
    first = group.fit(fresh(reward, "scorer", seed=1), PAIRS, BRADLEY_TERRY)
    other = group.fit(fresh(reward, "scorer", seed=2), PAIRS, BRADLEY_TERRY)
    assert same_bytes(first.weights, other.weights), "the seed is for a head that is missing"

    again = fresh(first.folder, "scorer", seed=3)
    scored = [group.score(role, source, LAST, select="at") for role, source in (("actor", other.source), ("reward", again))]
    assert scored[0] == scored[1]
    group.on_ranks(_hold, again)
    assert same_bytes(load_file(f"{group.keep('critic', again, trained=False).folder}/model.safetensors"), first.weights)


def test_a_new_head_depends_on_its_seed_alone(solo, pair, tied):
    made = []
    for stack, stage, seed in ((solo, 2, 1), (pair, 3, 1), (pair, 2, 1), (solo, 2, 2)):
        source = fresh(tied, "scorer", seed=seed)
        with stack.hardware(zero_stage=stage):
            stack.on_ranks(_hold, source)
            made.append(load_file(f"{stack.keep('critic', source, trained=False).folder}/model.safetensors")["score.weight"])
    assert torch.equal(made[0], made[1]) and torch.equal(made[0], made[2]) and not torch.equal(made[0], made[3])
    assert 0.5 < made[0].std() * 65**0.5 < 1.5


def test_a_saved_folder_has_the_generation_config_and_special_tokens_of_its_tokenizer(solo, tied):
    made = solo.fit(fresh(tied), ROWS)
    read = lambda folder, name: json.loads((folder / name).read_text())
    assert read(made.folder, "generation_config.json") == read(tied, "generation_config.json")
    config, generation = read(made.folder, "config.json"), read(tied, "generation_config.json")
    assert all(config[name] == generation[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id"))


def _hold(rank, source):
    rank._trainable("critic", source, OPTIMIZER, None)


def test_a_checkpoint_in_several_files_is_the_one_in_a_single_file(group, solo, tied):
    whole = group.fit(fresh(tied), ROWS)
    cut = {}
    for name, stack in {"one rank": solo, "two ranks": group}.items():
        stack.on_ranks(_limit, 60_000)
        stack.on_ranks(_open, whole.source)
        cut[name] = Trained([], stack.keep("actor", whole.source))
        stack.on_ranks(_limit, 2**32)
    files = {name: _files(made.folder) | _files(Path(made.source.optimizer).parent, Path(made.source.optimizer).name)
             for name, made in cut.items()}  # fmt: skip
    assert files["one rank"] == files["two ranks"], "who writes a file does not show in it"
    assert sum("model-" in name for name in files["two ranks"]) > 2 and sum("optimizer" in name for name in files["two ranks"]) > 2
    for made in cut.values():
        assert same_bytes(made.weights, whole.weights) and same_bytes(made.optimizer, whole.optimizer)
    gone_on = [group.fit(made.source, ROWS, role="critic", first_step=2, total_steps=4) for made in (whole, cut["two ranks"])]
    assert same_bytes(gone_on[0].weights, gone_on[1].weights) and same_bytes(gone_on[0].optimizer, gone_on[1].optimizer)


def _limit(rank, size):
    from stages.cluster import shards

    shards.LIMIT = size


def _open(rank, source):
    rank._trainable("actor", source, OPTIMIZER, None)


def _files(folder, beginning=""):
    """Contents of weight files, by name; numbers of the test's own names are left out."""
    return {re.sub(r"^(optimizer)-\d+", r"\1", path.name): path.read_bytes() for path in folder.glob(f"{beginning}*-of-*.safetensors")}
