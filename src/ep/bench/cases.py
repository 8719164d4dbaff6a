"""What every rank does in a step, and what must come of it, from a few numbers alone.

Nothing here talks to other ranks: each rank makes the others' inputs itself, and so knows its own
rows and results from the oracle.
"""

from __future__ import annotations

import dataclasses
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import ml_dtypes
import numpy as np

from ep import reference
from ep.layout import SOURCE_BITS, EpLayout
from ep.routing import Routing, partials_for, route, token_counts, tokens

if TYPE_CHECKING:
    from collections.abc import Iterable

    import numpy.typing as npt

    from ep.config import EpConfig
    from ep.reference import BFloat16Array, Rows

EPS = 1e-5
"""Of the norm."""
_NORM_WEIGHT_SEED = 100
"""First word of its seed, apart from those that `ep.routing` uses."""


class Inputs(NamedTuple):
    """What a rank gives to dispatch: bfloat16 `[T, H]`, int32 `[T, K]`, float32 `[T, K]`."""

    x: BFloat16Array
    ids: npt.NDArray[np.int32]
    weights: npt.NDArray[np.float32]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A kind of traffic.

    Parameters
    ----------
    config : EpConfig
    routing : Routing
    uneven : bool
        Whether ranks send different numbers of tokens.
    norm : bool
        Whether combine ends with the norm.
    seed : int
        At least 0.
    """

    config: EpConfig
    routing: Routing = Routing.UNIFORM
    uneven: bool = False
    norm: bool = True
    seed: int = 0

    def step(self, number: int, num_tokens: int) -> Step:
        """Give step `number`, in which a rank sends `num_tokens` tokens at most."""
        counts = token_counts(
            number, self.config.ranks, num_tokens, uneven=self.uneven, seed=self.seed
        )
        return Step(self, number, tuple(counts))

    @cached_property
    def norm_weight(self) -> BFloat16Array | None:
        """Bfloat16 `[H]` in 0.5..1.5, the same on every rank; None without a norm."""
        if not self.norm:
            return None
        generator = np.random.default_rng([_NORM_WEIGHT_SEED, self.seed])
        return generator.uniform(0.5, 1.5, self.config.hidden).astype(ml_dtypes.bfloat16)


@dataclasses.dataclass(frozen=True)
class Step:
    """One step of a case, on all ranks. Tests override `inputs` and `partials` for odd data.

    Attributes
    ----------
    case : Case
    number : int
        Seeds the data: no two steps have the same.
    counts : tuple of int
        T_s of each rank s.
    excluded : frozenset of int
        Ranks that take no part: they send nothing, and no partial comes of them.
    """

    case: Case
    number: int
    counts: tuple[int, ...]
    excluded: frozenset[int] = frozenset()

    def without(self, ranks: Iterable[int]) -> Self:
        """Give the same step with `ranks` excluded."""
        excluded = self.excluded | frozenset(ranks)
        counts = tuple(0 if rank in excluded else count for rank, count in enumerate(self.counts))
        return dataclasses.replace(self, counts=counts, excluded=excluded)

    def inputs(self, rank: int) -> Inputs:
        """What `rank` sends."""
        x = tokens(
            self.number, rank, self.counts[rank], self.case.config.hidden, seed=self.case.seed
        )
        return Inputs(x, *self.route(rank))

    def route(self, rank: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]:
        """Ids and weights of `inputs(rank)`, without the tokens."""
        config = self.case.config
        return route(
            self.case.routing,
            self.number,
            rank,
            num_tokens=self.counts[rank],
            top_k=config.top_k,
            ranks=config.ranks,
            experts=config.experts,
            seed=self.case.seed,
        )

    def answered_ids(self, rank: int) -> npt.NDArray[np.int32]:
        """Ids of `inputs(rank)`, -1 where the owner is excluded."""
        ids = self.inputs(rank).ids
        owners = reference.owner_of(ids, self.case.config.ranks, self.case.config.experts)
        return np.where(np.isin(owners, list(self.excluded)), np.int32(-1), ids)

    def partials(self, rank: int, source: npt.NDArray[np.int32]) -> BFloat16Array:
        """What the experts of `rank` make of rows with these source words `[rows]`; NaN at -1."""
        return partials_for(
            source, rank, self.case.config.hidden, step=self.number, seed=self.case.seed
        )

    def rows_to(self, rank: int) -> npt.NDArray[np.int64]:
        """Rows that `rank` sends to each rank, `[N]`."""
        config = self.case.config
        owners = config.owner_of(self.route(rank)[0])
        chosen = owners[:, :, None] == np.arange(config.ranks)
        rows: npt.NDArray[np.int64] = chosen.any(axis=1).sum(axis=0, dtype=np.int64)
        return rows

    def expected_rows(self, rank: int) -> Rows:
        """What dispatch must leave in the rows of `rank`."""
        sent = [self.inputs(src) for src in range(self.case.config.ranks)]
        (rows,) = reference.dispatch(
            [inputs.x for inputs in sent],
            [inputs.ids for inputs in sent],
            [inputs.weights for inputs in sent],
            receivers=[rank],
            **self._geometry,
        )
        return rows

    def empty_rows(self, rank: int) -> Rows:
        """What combine must leave in the rows of `rank`."""
        config, geometry = self.case.config, self._geometry
        fill = reference.empty_id(rank, config.ranks, config.experts)
        rows = config.ranks * geometry["stride"]
        return reference.Rows.empty(rows, config.hidden, config.top_k, fill)

    def expected_result(self, rank: int) -> BFloat16Array:
        """What combine must give to `rank`, `[T, H]`."""
        config, stride = self.case.config, self._geometry["stride"]
        num_tokens = self.counts[rank]
        ids = [np.empty((0, config.top_k), np.int32)] * config.ranks
        ids[rank] = self.answered_ids(rank)
        owners = reference.owner_of(ids[rank], config.ranks, config.experts)
        words = np.arange(num_tokens, dtype=np.int32) | (rank << SOURCE_BITS)
        partials = []
        for dst in range(config.ranks):
            # The oracle reads the rows of this rank's tokens only: the others stay as they are,
            # untouched memory that costs nothing.
            rows = np.empty((config.ranks * stride, config.hidden), ml_dtypes.bfloat16)
            source = np.where((owners == dst).any(axis=1), words, np.int32(-1))
            rows[rank * stride :][:num_tokens] = self.partials(dst, source)
            partials.append(rows)
        results = reference.combine(
            partials, ids, norm_weight=self.case.norm_weight, eps=EPS, **self._geometry
        )
        return results[rank]

    @cached_property
    def _geometry(self) -> dict[str, Any]:
        config = self.case.config
        return {
            "ranks": config.ranks,
            "experts": config.experts,
            "stride": EpLayout(config).stride,
        }
