#!/usr/bin/env bash
# Runs a command on ranks of this node, or of several, by the mpirun of MPICH or Open MPI.
#
#   launch/mpirun.sh [-n RANKS] [--hosts HOST:RANKS,...] [-o WORD]... COMMAND...
#
#   -n RANKS   ranks (as many as the hosts have together, else the GPUs of this node, else 16)
#   --hosts    nodes, and ranks on each; they see this folder, and ssh reaches them (or -o: another way)
#   -o WORD    a word for mpirun, such as -o -launcher -o ssh
#
#   EP_MPI     site: the machine's own mpirun, though a virtual environment has one
#   EP_VENV    virtual environment, in a folder that all nodes see (.venv, where there is one)
#   others     launch/env.sh
set -euo pipefail

# shellcheck source-path=SCRIPTDIR source=_setup.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/_setup.sh"

ranks='' hosts='' words=()
while (($#)); do
  case $1 in
    -h | --help)
      ep_help
      exit
      ;;
    -n | -np | --hosts | -o)
      (($# > 1)) || ep_die "$1 needs a value: see --help"
      case $1 in
        -n | -np) ranks=$2 ;;
        --hosts) hosts=$2 ;;
        -o) words+=("$2") ;;
      esac
      shift 2
      ;;
    --)
      shift
      break
      ;;
    -*) ep_die "$1 is not known: see --help" ;;
    *) break ;;
  esac
done
(($#)) || ep_die "no COMMAND, such as python -m ep.bench: see --help"

total=0
if [[ -n $hosts ]]; then
  IFS=, read -ra parts <<<"$hosts"
  for part in "${parts[@]}"; do
    [[ $part =~ ^[A-Za-z0-9._-]+:([1-9][0-9]?)$ ]] || ep_die "'$part' of --hosts is no HOST:RANKS, such as nvl0:4"
    ((total += BASH_REMATCH[1]))
  done
fi
if [[ -z $ranks ]]; then
  ranks=$total
  if ((ranks == 0)) && ep_has_gpu; then ranks=$(nvidia-smi -L | grep -c ^GPU); fi
  if ((ranks == 0)); then ranks=16; fi
fi
[[ $ranks =~ ^[1-9][0-9]?$ && $ranks -le 72 ]] || ep_die "$ranks is not a number of ranks: 1 to 72"
((total == 0 || ranks <= total)) || ep_die "$ranks ranks do not fit on --hosts, which have $total"

# shellcheck source-path=SCRIPTDIR source=env.sh
source "$ep_root/launch/env.sh"
venv=${EP_VENV:-$ep_root/.venv}
if [[ -d $venv ]]; then ep_activate "$venv"; fi
command -v mpirun >/dev/null || ep_die "no mpirun: launch/bench.sh makes a .venv with one, or load the site's MPI"

case $(mpirun --version 2>&1) in
  *"Open MPI"* | *prterun*)
    if ((total == 0)); then ep_tune_openmpi "$ranks"; fi
    # It takes nothing along to other nodes that is not named.
    while read -r name; do
      words+=(-x "$name")
    done < <(compgen -e | grep -E '^(EP|NVSHMEM|CUDA)_|^(PATH|LD_LIBRARY_PATH|PYTHONPATH)$')
    words+=(${hosts:+--host "$hosts"})
    ;;
  *HYDRA* | *MPICH*)
    ep_tune_mpich "$ranks"
    words+=(${hosts:+-hosts "$hosts"})
    ;;
  *) ep_die "the mpirun in PATH is neither MPICH's nor Open MPI's: $(command -v mpirun)" ;;
esac
exec mpirun -np "$ranks" "${words[@]}" "$@" </dev/null
