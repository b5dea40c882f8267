"""Training in bfloat16 keeps its parameters in float32."""

import pytest
import torch

from stages.cluster.rows import Rows

from .stack import fresh, same_bytes, sequences

FIRST, SECOND = Rows.of(sequences(12, seed=1)), Rows.of(sequences(12, seed=2))


@pytest.mark.parametrize("stage", [2, 3])
def test_float32_masters_outlive_saving_and_going_on(pair, tied, stage):
    with pair.hardware(zero_stage=stage):
        first = pair.fit(fresh(tied, precision="bfloat16"), FIRST, total_steps=4)
        masters = {name[7:]: value for name, value in first.optimizer.items() if name.startswith("master/")}
        assert masters.keys() == first.weights.keys()
        for name, value in first.weights.items():
            assert value.dtype == torch.bfloat16 and masters[name].dtype == torch.float32
            assert torch.equal(masters[name].bfloat16(), value)
        assert any(not torch.equal(masters[name], value.float()) for name, value in first.weights.items())

        warm = pair.fit(first.source, SECOND, first_step=2, total_steps=4)
        cold = pair.fit(first.source, SECOND, role="critic", first_step=2, total_steps=4)
        assert warm.metrics == cold.metrics
        assert same_bytes(warm.optimizer, cold.optimizer) and same_bytes(warm.weights, cold.weights)
