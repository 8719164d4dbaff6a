# shellcheck shell=bash
# Sourced by the scripts beside it, and by yours before srun or mpirun: what a job is told, and why.
# What is set already stays. A line that begins with # shows what can be set.

# NVSHMEM

# Ranks reach each other by NVLink alone: no search for network cards, and no errors about them.
export NVSHMEM_REMOTE_TRANSPORT=${NVSHMEM_REMOTE_TRANSPORT:-none}
# Multicast is of no use to ep, and takes objects of the fabric that may be short.
export NVSHMEM_DISABLE_NVLS=${NVSHMEM_DISABLE_NVLS:-1}
# Each rank's share of memory, for the buffers of all exchanges; an error says if it is too small.
export NVSHMEM_SYMMETRIC_SIZE=${NVSHMEM_SYMMETRIC_SIZE:-1G}
# Handles of memory: ANY, the default, takes FABRIC where nodes share an NVLink fabric. FABRIC fails early without IMEX.
#export NVSHMEM_CUMEM_HANDLE_TYPE=${NVSHMEM_CUMEM_HANDLE_TYPE:-FABRIC}
# Its words, on each rank's stderr, when it does not start.
#export NVSHMEM_DEBUG=${NVSHMEM_DEBUG:-INFO}

# ep

# Compiled kernels: a folder that all nodes see is filled once. One that others can write is not used.
export EP_CACHE_DIR=${EP_CACHE_DIR:-~/.cache/ep}
# Check values, not only shapes: each call then waits for the GPU.
#export EP_CHECK=${EP_CHECK:-1}
# Memory of the host backend: where nodes are containers of one machine, a folder that all of them see.
#export EP_SHM_DIR=${EP_SHM_DIR:-/dev/shm}
# Several ranks a GPU: right, but slow without CUDA MPS, and no measure of more GPUs.
#export EP_SHARE_GPUS=${EP_SHARE_GPUS:-1}
# A table of grids of your own, as ep.tune writes it.
#export EP_TUNING=${EP_TUNING:-tuning.toml}
# Commit that rows of --json name, where ep is installed and no checkout.
#export EP_COMMIT=${EP_COMMIT:-}
# Go on with other versions of the extra gpu than the tested ones.
#export EP_UNTESTED_VERSIONS=${EP_UNTESTED_VERSIONS:-1}

# Ranks that no launcher counts, or that meet without MPI: docs/bootstrap.md

# auto, mpi or tcp: how the ranks find each other.
#export EP_BOOTSTRAP=${EP_BOOTSTRAP:-auto}
# The same random text on all ranks, by which they prove themselves where they meet over TCP; never in a script.
#export EP_SECRET=${EP_SECRET:-}
# Socket of the munge that does it where there is no EP_SECRET, if it is not the default one.
#export EP_MUNGE_SOCKET=${EP_MUNGE_SOCKET:-/run/munge/munge.socket.2}
# Where they meet: host:port of rank 0.
#export EP_RENDEZVOUS=${EP_RENDEZVOUS:-}
# Rank, ranks and local rank of a process, where neither Slurm, MPI nor torchrun says so.
#export EP_RANK=${EP_RANK:-} EP_RANKS=${EP_RANKS:-} EP_LOCAL_RANK=${EP_LOCAL_RANK:-}
