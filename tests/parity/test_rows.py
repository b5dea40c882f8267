"""Rows hold what they say, or refuse to be made."""

import math

import numpy as np
import pytest

from stages.cluster.rows import Rows


def rows(**changes):
    fields = {"tokens_T": [1, 2, 3, 4, 5], "lengths_S": [3, 2], "chosen_T": [0, 1, 1, 0, 1]} | changes
    kinds = {"tokens_T": np.int32, "lengths_S": np.int64, "chosen_T": bool}
    return Rows(**{name: np.array(v, dtype=kinds[name]) if name in kinds else v for name, v in fields.items()})


@pytest.mark.parametrize(
    "changes",
    [
        {"tokens_T": [1, 2, 3, 4]},
        {"chosen_T": [0, 1, 1, 0]},
        {"lengths_S": [3, 3]},
        {"lengths_S": [5, 0]},
        {"chosen_T": [1, 1, 1, 0, 1]},
        {"token_fields": {"returns": np.zeros(2)}},
        {"row_fields": {"reference": np.zeros(3)}},
        {"lengths_S": [2, 2, 1], "chosen_T": [0, 1, 0, 1, 0], "per_row": 2},
    ],
)
def test_columns_that_do_not_fit_together_are_refused(changes):
    rows()
    with pytest.raises(ValueError):
        rows(**changes)


def test_a_prompt_without_a_token_is_refused():
    with pytest.raises(ValueError, match="nothing predicts it"):
        Rows.of([([], [7, 8])])


def test_a_token_field_has_values_for_response_tokens_only_so_no_masked_place_can_hold_anything():
    made = Rows.of([([1, 2], [3, 4, 5]), ([6], [7])], token_fields={"returns": [[0.1, 0.2, 0.3], [0.4]]})
    assert made.token_fields["returns"].tolist() == pytest.approx([0.1, 0.2, 0.3, 0.4])
    assert made.tokens_T[made.chosen_T].tolist() == [3, 4, 5, 7]
    with pytest.raises(ValueError, match="returns: 6 values for 4 chosen tokens"):
        Rows.of([([1, 2], [3, 4, 5]), ([6], [7])], token_fields={"returns": [[math.nan, 0.1, 0.2, 0.3], [math.nan, 0.4]]})


def test_values_of_chosen_tokens_split_into_sequences_with_and_without_any():
    made = Rows.of([([1], [2, 3]), ([4], []), ([5], [6])])
    assert made.chosen_S.tolist() == [2, 0, 1]
    assert [part.tolist() for part in made.split(np.array([1, 2, 3]))] == [[1, 2], [], [3]]
