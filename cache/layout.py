"""How many bytes a token costs, and where they lie: the geometry of pages and rows. Plain numbers, no jax.

A page is one sliding window of consecutive positions (design: the page is the window). Two id spaces: *global* pages
hold the compressed rows and index keys of the KV sources, *window* pages the raw window rows of every layer. A row is
kept as 32-bit words, data and scales apart; rows shorter than a line of 128 words share a line, so a row takes a
power of two of words.
"""

from dataclasses import dataclass

LINE_WORDS = 128
WORD_BYTES = 4
FP8_GROUP = 32
KEY_GROUP = 32
KV_GROUP = 16


def row_words(num_bytes: int) -> int:
    """Words that a row of `num_bytes` takes: a power of two up to a line, whole lines beyond."""
    words = -(-num_bytes // WORD_BYTES)
    if words > LINE_WORDS:
        return -(-words // LINE_WORDS) * LINE_WORDS
    return 1 << (words - 1).bit_length()


@dataclass(frozen=True)
class RowLayout:
    """One kind of stored row: `num_values` codes of `bits` each, and one scale byte per `group` values."""

    num_values: int
    bits: int
    group: int

    @property
    def data_words(self) -> int:
        return row_words(self.num_values * self.bits // 8)

    @property
    def num_scales(self) -> int:
        return self.num_values // self.group

    @property
    def scale_words(self) -> int:
        return row_words(self.num_scales)

    @property
    def row_bytes(self) -> int:
        return (self.data_words + self.scale_words) * WORD_BYTES


@dataclass(frozen=True)
class SourceGroup:
    """The KV sources of one compress ratio: `layers` in order, `rows_per_page` rows of a page each."""

    ratio: int
    layers: tuple[int, ...]
    rows_per_page: int


@dataclass(frozen=True)
class CacheLayout:
    """Sizes of the paged state of one rank.

    `page_size` tokens a page, `num_window_layers` layers with a window (draft layers included), `kv_dim` latent width,
    `key_dim` index key width, `groups` the KV sources by ratio.
    """

    page_size: int
    num_window_layers: int
    kv_dim: int
    key_dim: int
    groups: tuple[SourceGroup, ...]

    @property
    def window_row(self) -> RowLayout:
        return RowLayout(self.kv_dim, 8, FP8_GROUP)

    @property
    def kv_row(self) -> RowLayout:
        return RowLayout(self.kv_dim, 4, KV_GROUP)

    @property
    def key_row(self) -> RowLayout:
        return RowLayout(self.key_dim, 4, KEY_GROUP)

    @property
    def window_page_bytes(self) -> int:
        return self.num_window_layers * self.page_size * self.window_row.row_bytes

    @property
    def global_page_bytes(self) -> int:
        rows = sum(len(group.layers) * group.rows_per_page for group in self.groups)
        return rows * (self.kv_row.row_bytes + self.key_row.row_bytes)


def lines_for(num_rows: int, words: int) -> int:
    """Lines of 128 words that `num_rows` rows of `words` words fill."""
    return -(-num_rows * words // LINE_WORDS)
