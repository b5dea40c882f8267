"""Packing."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stages.algorithms.logprobs import token_logprobs
from stages.algorithms.loss import Loss
from stages.algorithms.packing import IGNORED_TARGET, block_causal_mask, pack, padded_position_ids
from stages.algorithms.sft import token_nll_loss

sequences_strategy = st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=7), min_size=1, max_size=8)


def test_packing_restarts_positions_and_predicts_nothing_across_sequences():
    packed = pack([[5, 6, 7], [8, 9]], capacity=5, pad_id=0)
    assert packed.input_ids_RC.tolist() == [[5, 6, 7, 8, 9]]
    assert packed.position_ids_RC.tolist() == [[0, 1, 2, 0, 1]]
    assert packed.cu_seqlens.tolist() == [0, 3, 5]
    assert packed.targets_RC.tolist() == [[6, 7, -100, 9, -100]]
    assert packed.where == ((0, 0), (0, 3))
    assert packed.flat_index(1, 1) == 4


def test_padding_is_a_segment_of_its_own():
    packed = pack([[5, 6, 7], [8, 9], [4]], capacity=5, pad_id=0)
    assert packed.where == ((0, 0), (0, 3), (1, 0))
    assert packed.position_ids_RC.tolist() == [[0, 1, 2, 0, 1], [0, 0, 1, 2, 3]]
    assert packed.cu_seqlens.tolist() == [0, 3, 5, 6, 10]
    assert packed.targets_RC[1].tolist() == [-100] * 5
    visible = block_causal_mask(packed.position_ids_RC)
    assert visible[1, 0].tolist() == [True, False, False, False, False]
    assert not visible[1, 1:, 0].any()


@pytest.mark.parametrize("sequences", [[], [[]], [[1], []]])
def test_nothing_and_empty_sequences_cannot_be_packed(sequences):
    with pytest.raises(ValueError, match="one or more"):
        pack(sequences, capacity=4, pad_id=0)


def test_a_sequence_longer_than_a_row_is_an_error():
    with pytest.raises(ValueError, match="item 0 has 5"):
        pack([[1] * 5], capacity=4, pad_id=0)


def test_position_ids_of_padded_rows():
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 0, 0, 0]], dtype=torch.bool)
    got = padded_position_ids(mask)
    assert [got[row][mask[row]].tolist() for row in (0, 1)] == [[0, 1, 2], [0, 1]]


@settings(deadline=None, max_examples=60)
@given(sequences_strategy, st.integers(7, 12))
def test_packing_then_unpacking_is_identity(sequences, capacity):
    packed = pack(sequences, capacity=capacity, pad_id=0)
    for i, sequence in enumerate(sequences):
        indexes = [packed.flat_index(i, position) for position in range(len(sequence))]
        assert packed.input_ids_RC.flatten()[indexes].tolist() == sequence
        assert packed.position_ids_RC.flatten()[indexes].tolist() == list(range(len(sequence)))
        assert packed.targets_RC.flatten()[indexes].tolist() == [*sequence[1:], IGNORED_TARGET]
    boundaries = packed.cu_seqlens.tolist()
    assert boundaries[0] == 0 and boundaries[-1] == packed.input_ids_RC.numel()
    assert (packed.targets_RC != IGNORED_TARGET).sum() == sum(len(sequence) - 1 for sequence in sequences)


class OneLayer(torch.nn.Module):
    """Causal self-attention over embeddings of ids and positions: enough to notice a neighbour."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.ids, self.positions = torch.nn.Embedding(10, 8), torch.nn.Embedding(12, 8)
        self.qkv, self.head = torch.nn.Linear(8, 24), torch.nn.Linear(8, 10)
        self.double()

    def loss(self, input_ids, position_ids, targets) -> Loss:
        hidden = self.ids(input_ids) + self.positions(position_ids)
        q, k, v = self.qkv(hidden).chunk(3, dim=-1)
        mask = block_causal_mask(position_ids)
        hidden = hidden + torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return token_nll_loss(token_logprobs(self.head(hidden), targets.clamp(min=0)), targets != IGNORED_TARGET)


@settings(deadline=None, max_examples=20)
@given(sequences_strategy, st.integers(7, 12))
def test_packed_losses_and_gradients_equal_unpacked(sequences, capacity):
    model = OneLayer()
    alone = [pack([sequence], capacity=len(sequence), pad_id=0) for sequence in sequences]
    results = []
    for batches in (alone, [pack(sequences, capacity=capacity, pad_id=0)]):
        model.zero_grad()
        losses = [model.loss(batch.input_ids_RC, batch.position_ids_RC, batch.targets_RC) for batch in batches]
        total = sum(losses[1:], losses[0])
        total.sum.backward()
        results.append((total.sum.item(), total.count.item(), model.qkv.weight.grad.clone()))
    assert results[0][:2] == pytest.approx(results[1][:2], abs=1e-9)
    assert torch.allclose(results[0][2], results[1][2], atol=1e-9)
