"""Hypothesis strategies shared by the property tests."""

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
