"""What the paged state costs at the released shapes (design: 890 bytes a token, 2.9 MB a window page)."""

import jax
import pytest

from rorqual.cache.layout import LINE_WORDS, WORD_BYTES, CacheLayout, RowLayout, SourceGroup, lines_for, row_words
from rorqual.cache.pools import abstract_pools

# Spec sections 1 and 9: 40 layers and 3 of the draft, latents of 512, keys of 128, sources at ratio 2 and 1.
RELEASED = CacheLayout(128, 43, 512, 128, (SourceGroup(2, (2, 8, 14), 64), SourceGroup(1, (20,), 128)))


def test_released_rows():
    assert RELEASED.window_row.row_bytes == 512 + 16
    assert RELEASED.kv_row.row_bytes == 256 + 32
    assert RELEASED.key_row.row_bytes == 64 + 4


def test_a_token_costs_890_bytes():
    assert RELEASED.global_page_bytes == 890 * 128


def test_a_window_page_costs_2_9_megabytes():
    assert RELEASED.window_page_bytes == 43 * 128 * 528 == 2_906_112


@pytest.mark.parametrize(
    ("num_bytes", "words"),
    [(1, 1), (4, 1), (5, 2), (64, 16), (68, 32), (256, 64), (288, 128), (512, 128), (513, 256), (1025, 384)],
)
def test_a_row_takes_a_power_of_two_of_words_or_whole_lines(num_bytes: int, words: int):
    assert row_words(num_bytes) == words


def test_a_row_never_crosses_a_line():
    for num_bytes in range(1, 2050):
        words = row_words(num_bytes)
        assert words * WORD_BYTES >= num_bytes
        assert LINE_WORDS % words == 0 or words % LINE_WORDS == 0


def test_lines_hold_every_row():
    assert [lines_for(rows, 16) for rows in (0, 1, 8, 9)] == [0, 1, 1, 2]
    assert lines_for(3, 256) == 6


def test_tiny_rows_are_padded_to_words():
    row = RowLayout(64, 4, 16)
    assert (row.data_words, row.num_scales, row.scale_words) == (8, 4, 1)


@pytest.mark.parametrize(("global_pages", "window_pages"), [(1, 1), (7, 3), (1000, 40)])
def test_pools_are_as_large_as_their_pages(global_pages: int, window_pages: int):
    """Two pages fill whole lines in every array; an odd one leaves less than a line of a source unused."""
    pools = abstract_pools(RELEASED, global_pages, window_pages)
    window = sum(array.size * 4 for array in pools.window)
    sources = sum(array.size * 4 for array in jax.tree.leaves(pools.sources))
    assert window == window_pages * RELEASED.window_page_bytes
    spare = sources - global_pages * RELEASED.global_page_bytes
    assert spare == 0 if global_pages % 2 == 0 else 0 <= spare < 4 * LINE_WORDS * WORD_BYTES
