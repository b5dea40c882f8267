"""What the workflow counts on of Snakemake's own defaults, and which placements it refuses."""

import pytest
from snakemake.cli import get_argument_parser

from stages.errors import UserError


def test_the_rate_limit_that_is_lifted_is_the_one_that_snakemake_sets_by_itself():
    limit = get_argument_parser([]).parse_args([]).max_jobs_per_timespan
    assert (limit.max_jobs, limit.timespan) == (100, 1)


def test_impossible_placements_on_gpus_are_one_line():
    from stages.cluster.placement import check

    engines = {"colocate": True, "count": 1, "tensor_parallel": 1}
    check(engines, 2, 2)
    for change, ranks, said in (
        ({"tensor_parallel": 2}, 2, "colocate: false"),
        ({"count": 3}, 2, "3 engines share the GPUs of 2 ranks"),
        ({}, 4, "want 4 GPUs, the cluster has 2"),
        ({"colocate": False, "count": 1, "tensor_parallel": 2}, 1, "want 3 GPUs, the cluster has 2"),
    ):
        with pytest.raises(UserError, match=said):
            check(engines | change, ranks, 2)


def test_gpus_count_only_for_a_torch_that_can_use_them():
    import torch

    from stages.cluster.placement import _made_for_cuda

    assert _made_for_cuda() == (torch.version.cuda is not None)
