"""`python -m ep.tune`: measure which grids of the kernels are fast, and write the table of them."""
