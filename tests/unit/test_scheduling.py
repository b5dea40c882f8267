"""What of Snakemake's own defaults the workflow counts on."""

from snakemake.cli import get_argument_parser


def test_the_rate_limit_that_is_lifted_is_the_one_that_snakemake_sets_by_itself():
    limit = get_argument_parser([]).parse_args([]).max_jobs_per_timespan
    assert (limit.max_jobs, limit.timespan) == (100, 1)
