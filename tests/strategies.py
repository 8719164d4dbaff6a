"""Hypothesis strategies shared by the property tests."""

from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
from hypothesis import strategies as st

from ep import EpConfig
from ep.config import MAX_HIDDEN, MAX_RANKS, MAX_TOKENS, MAX_TOP_K, SCALE_BLOCK


def configs(
    *, ranks=MAX_RANKS, hidden=MAX_HIDDEN, experts=4096, top_k=MAX_TOP_K, max_tokens=MAX_TOKENS
) -> st.SearchStrategy[EpConfig]:
    """Any allowed config up to the given limits."""
    return st.builds(
        EpConfig,
        ranks=st.integers(1, ranks),
        hidden=st.integers(1, hidden // SCALE_BLOCK).map(lambda blocks: blocks * SCALE_BLOCK),
        experts=st.integers(1, experts),
        top_k=st.integers(1, top_k),
        max_tokens=st.integers(1, max_tokens),
    )


class Hostile:
    """Raises at whatever it is asked."""

    def _refuse(self, *arguments, **options):
        raise RuntimeError("no")

    __repr__ = __str__ = __bool__ = __len__ = __iter__ = __getitem__ = __call__ = _refuse
    __index__ = __int__ = __float__ = __getattr__ = __eq__ = __lt__ = __array__ = _refuse
    __hash__ = object.__hash__

    def _repr_pretty_(self, printer, cycle):
        printer.text("Hostile()")


def endless() -> list[Any]:
    """Give a list that holds itself."""
    values: list[Any] = []
    values.append(values)
    return values


def nested() -> list[Any]:
    """Give a list deeper than Python's stack."""
    values: list[Any] = []
    for _ in range(100_000):
        values = [values]
    return values


ODD: tuple[Callable[[], Any], ...] = (
    Hostile,
    endless,
    nested,
    object,
    set,
    lambda: int,
    lambda: 10**5000,
    lambda: -(10**5000),
    lambda: 10**30,
    lambda: 2**63,
    lambda: -1,
    lambda: 1e400,
    lambda: float("nan"),
    lambda: 1j,
    lambda: Fraction(10**400),
    lambda: Fraction(1, 10**400),
    lambda: Decimal("sNaN"),
    lambda: "",
    lambda: "x" * 10_000,
    lambda: "\ud800\0",
    lambda: "~no_such_user_here/x.toml",
    lambda: {"a": endless()},
    lambda: np.int8(3),
    lambda: np.float16("nan"),
    lambda: np.complex128(1),
    lambda: np.array(3),
    lambda: np.array([1, 2]),
    lambda: np.array([None]),
    lambda: np.ma.masked,
    lambda: ml_dtypes.bfloat16(2),
)


def anything() -> st.SearchStrategy[Any]:
    """Whatever a caller may pass by mistake or to do harm; new each time."""
    odd = st.integers(0, len(ODD) - 1).map(lambda index: ODD[index]())
    plain = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary()
    return odd | plain | st.lists(plain, max_size=3) | st.dictionaries(st.text(), plain, max_size=2)
