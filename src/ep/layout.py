"""Where everything lies in a rank's buffer: one table of fields, pure arithmetic.

Every size, offset and view, on the host and in kernels, derives from `EpLayout.fields`. All ranks
have the same layout, so an address on a peer is the peer's base plus the same offset.
"""

from __future__ import annotations

import dataclasses
import math
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal

from ep.config import SCALE_BLOCK, EpConfig, Protocol
from ep.errors import ArgumentError, shown

if TYPE_CHECKING:
    from collections.abc import Mapping

LINE_BYTES = 128
"""Unit of ownership: beside its owner at most one rank writes a line (NVLink's packet, too)."""
HEADER_WORDS = 4
"""int32 words of a row's header: the source word, then padding up to one 16-byte store."""
SOURCE_BITS = 16
"""The source word is `(src_rank << SOURCE_BITS) | token_idx`."""
EMPTY_SOURCE = -1
CHUNK_BYTES = 16
"""What a GPU stores and loads in one indivisible access."""
CHUNK_SCALES = CHUNK_BYTES
"""Scales in a chunk: those of 512 elements, which one warp quantizes."""
NOTHING = 0xFFFFFFFF
"""Last word of a chunk that has not arrived."""
PARITIES = 2
"""Halves of what other ranks store into: steps take turns, so that none overwrites another."""

Writer = Literal["source", "destination", "peer", "own"]


@dataclasses.dataclass(frozen=True)
class Field:
    """One array of the buffer.

    Attributes
    ----------
    name : str
    dtype : str
        Name of the element's NumPy or ml_dtypes type.
    shape : tuple of int
    strides_bytes : tuple of int
        Distance of neighbours along each axis. The last axis is dense.
    offset_bytes : int
        From the buffer's base; a multiple of `LINE_BYTES`.
    size_bytes : int
        A multiple of `LINE_BYTES`.
    writer : str
        Who stores into it from afar: "source" (rows, block s by rank s), "destination" (slots,
        column d by rank d), "peer" (line s by rank s), "own" (nobody but the owner).
        Where a field has halves for odd and even steps, that axis comes first.
    what : str
        One line for people; `docs/layout.md` prints it.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    strides_bytes: tuple[int, ...]
    offset_bytes: int
    size_bytes: int
    writer: Writer
    what: str


@dataclasses.dataclass(frozen=True)
class EpLayout:
    """Byte layout of the buffer that each rank of `config` allocates.

    Attributes
    ----------
    config : EpConfig
    stride : int
        Rows kept for each source: max_tokens rounded up so that no line of any receive array holds
        rows of two sources.
    rows : int
        Receive rows, `ranks * stride`; row of token t of source s: `s * stride + t`.
    fields : mapping of str to Field
        In order of address.
    total_bytes : int

    Raises
    ------
    ArgumentError
        If `config` is none.
    """

    config: EpConfig

    def __post_init__(self) -> None:
        if not isinstance(self.config, EpConfig):
            raise ArgumentError(f"config is {shown(self.config)}; allowed is an EpConfig")

    @cached_property
    def stride(self) -> int:  # noqa: D102 - described by the class
        unit = max(LINE_BYTES // math.gcd(LINE_BYTES, row) for row in self._row_bytes.values())
        return _round_up(self.config.max_tokens, unit)

    @property
    def rows(self) -> int:  # noqa: D102 - described by the class
        return self.config.ranks * self.stride

    @cached_property
    def fields(self) -> Mapping[str, Field]:  # noqa: D102 - described by the class
        table: dict[str, Field] = {}
        end = 0
        for name, dtype, shape, strides, writer, what in self._specs():
            size = _round_up(shape[0] * strides[0], LINE_BYTES)
            table[name] = Field(name, dtype, shape, strides, end, size, writer, what)
            end += size
        return MappingProxyType(table)

    @cached_property
    def total_bytes(self) -> int:  # noqa: D102 - described by the class
        return sum(field.size_bytes for field in self.fields.values())

    @cached_property
    def source(self) -> Field:
        """The source words as an array of their own, `[rows]`: word 0 of each header."""
        header = self.fields["header"]
        return dataclasses.replace(
            header, name="source", shape=header.shape[:1], strides_bytes=header.strides_bytes[:1]
        )

    @property
    def x_chunks(self) -> int:
        """Chunks of a staged row that hold its elements; those of the scales follow."""
        return self.config.hidden // CHUNK_BYTES

    @property
    def scale_chunks(self) -> int:
        """Chunks that hold its scales, those of 512 elements each."""
        return -(-self.config.hidden // SCALE_BLOCK // CHUNK_SCALES)

    @property
    def first_choice_chunk(self) -> int:
        """The first of a chunk for each choice: id and weight."""
        return self.x_chunks + self.scale_chunks

    @property
    def head_chunk(self) -> int:
        """The last chunk: the source word, and in which step."""
        return self.first_choice_chunk + self.config.top_k

    @property
    def row_chunks(self) -> int:
        """Chunks of a staged row."""
        return self.head_chunk + 1

    def row(self, src_rank: int, token_idx: int) -> int:
        """Receive row of token `token_idx` of rank `src_rank`."""
        return src_rank * self.stride + token_idx

    def table(self) -> str:
        """Give the fields as a Markdown table: offset, size, type, shape, writer, meaning."""
        titles = ("offset", "bytes", "field", "type", "shape", "written by", "what")
        head = f"| {' | '.join(titles)} |\n{'|---' * len(titles)}|\n"
        return head + "".join(
            f"| {f.offset_bytes} | {f.size_bytes} | `{f.name}` | {f.dtype} | {list(f.shape)} "
            f"| {f.writer} | {f.what} |\n"
            for f in self.fields.values()
        )

    @property
    def _row_bytes(self) -> dict[str, int]:
        config = self.config
        return {
            "x": config.hidden,
            "scales": config.hidden // SCALE_BLOCK,
            "ids": 4 * config.top_k,
            "weights": 4 * config.top_k,
            "header": 4 * HEADER_WORDS,
        }

    def _specs(
        self,
    ) -> list[tuple[str, str, tuple[int, ...], tuple[int, ...], Writer, str]]:
        config, rows, row = self.config, self.rows, self._row_bytes
        slot_bytes = _round_up(2 * config.hidden, LINE_BYTES)
        token_bytes = config.ranks * slot_bytes
        line_words = LINE_BYTES // 4
        flags = (config.ranks, line_words)
        # Whole lines, so that stores of a warp are whole packets.
        row_bytes = CHUNK_BYTES * self.row_chunks
        staged_bytes = _round_up(row_bytes, LINE_BYTES)
        block_bytes = config.max_tokens * staged_bytes
        staged: list[tuple[str, str, tuple[int, ...], tuple[int, ...], Writer, str]] = [
            (
                "staging",
                "uint32",
                (PARITIES, config.ranks, config.max_tokens, row_bytes // 4),
                (config.ranks * block_bytes, block_bytes, staged_bytes, 4),
                "source",
                "rows as they travel; all ones where nothing has arrived",
            ),
            (
                "announcements",
                "uint32",
                (PARITIES, config.ranks, line_words),
                (config.ranks * LINE_BYTES, LINE_BYTES, 4),
                "peer",
                "line s: chunk 0, step that rank s is in, tokens it sends; chunk 1, its clearance",
            ),
        ]
        is_fence_free = config.protocol is Protocol.FENCE_FREE
        if not is_fence_free:
            staged = []
        halves = PARITIES if is_fence_free else 1
        return [
            (
                "x",
                "float8_e4m3fn",
                (rows, config.hidden),
                (row["x"], 1),
                "source",
                "received tokens, E4M3",
            ),
            (
                "scales",
                "float8_e8m0fnu",
                (rows, config.hidden // SCALE_BLOCK),
                (row["scales"], 1),
                "source",
                "their E8M0 scales, one a 32-block",
            ),
            (
                "ids",
                "int32",
                (rows, config.top_k),
                (row["ids"], 4),
                "source",
                "their global expert ids",
            ),
            (
                "weights",
                "float32",
                (rows, config.top_k),
                (row["weights"], 4),
                "source",
                "their routing weights",
            ),
            (
                "header",
                "int32",
                (rows, HEADER_WORDS),
                (row["header"], 4),
                "source",
                "word 0: the source word, -1 where the row is empty",
            ),
            (
                "slots",
                "bfloat16",
                (halves, config.max_tokens, config.ranks, config.hidden),
                (config.max_tokens * token_bytes, token_bytes, slot_bytes, 2),
                "destination",
                "partials come back here: [half, token, destination]",
            ),
            (
                "dispatch_flags",
                "uint32",
                flags,
                (LINE_BYTES, 4),
                "peer",
                "word 0 of line s: rank s has sent its tokens",
            ),
            (
                "combine_flags",
                "uint32",
                flags,
                (LINE_BYTES, 4),
                "peer",
                "word 0 of line s: rank s has sent its partials",
            ),
            (
                "counts",
                "int32",
                (config.ranks,),
                (4,),
                "own",
                "tokens that each other rank sent in this step",
            ),
            (
                "control",
                "uint32",
                (4, line_words),
                (LINE_BYTES, 4),
                "own",
                "steps and arrivals of this rank, a line each",
            ),
            *staged,
        ]


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit
