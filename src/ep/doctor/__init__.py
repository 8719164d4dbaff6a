"""`python -m ep.doctor`: what is wrong with this machine or job, and what to do about it.

A rank is two processes: `supervise` starts a child, in which everything happens that can hang or
crash (`child`), and survives it. Checks of one process are in `software`, `launch`, `machine` and
`gpu`, those over ranks in `ranks` and `reach`; the calls of CUDA and NVML they stand on are in
`probe`. Nothing here is imported by `ep` itself.
"""
