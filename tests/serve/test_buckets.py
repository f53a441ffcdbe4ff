"""The bucket table: every step finds a size, and the sizes stay few."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rorqual.serve.buckets import Buckets, bucket_table


def test_the_table_grows_by_four_and_ends_at_the_largest_step():
    assert bucket_table(4096, 256).token_sizes == (16, 64, 256, 1024, 4096)
    assert bucket_table(1000, 100).token_sizes == (16, 64, 112, 256, 1008)  # 112: a decode step of all rows
    assert bucket_table(8, 8).token_sizes == (16,)


@given(st.integers(1, 100_000), st.data())
def test_every_step_fits(max_step_tokens, data):
    max_rows = data.draw(st.integers(1, max_step_tokens))
    buckets = bucket_table(max_step_tokens, max_rows)
    num_tokens = data.draw(st.integers(1, max_step_tokens))
    size = buckets.fit(num_tokens)
    assert num_tokens <= size and size in buckets.token_sizes and size % 16 == 0
    assert all(smaller < num_tokens for smaller in buckets.token_sizes if smaller < size)
    assert min(num_tokens, max_rows) <= buckets.rows(size) <= max_rows
    assert len(buckets.token_sizes) <= 10 and buckets.token_sizes[-1] - max_step_tokens < 16
    assert buckets.fit(max_rows) - max_rows < 16  # the full house decodes in a step of its own size


def test_numbers_out_of_range_are_refused():
    buckets = bucket_table(64, 4)
    for num_tokens in (0, 65):
        with pytest.raises(ValueError, match=f"num_tokens: {num_tokens}, allowed 1..64"):
            buckets.fit(num_tokens)
    with pytest.raises(ValueError, match="max_rows: 65, allowed 1..max_step_tokens = 64"):
        bucket_table(64, 65)
    for sizes in ((), (64, 16), (16, 16), (0, 16)):
        with pytest.raises(ValueError, match="token_sizes"):
            Buckets(sizes, 4)
