"""`python -m ep.bench`: check an exchange against the oracle, then time it.

`cases` and `check` are also what the multi-rank tests use; nothing here is imported by `ep` itself.
"""
