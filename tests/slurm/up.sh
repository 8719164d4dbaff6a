#!/usr/bin/env bash
# Starts a Slurm of 4 nodes x 4 slots on this machine: nvl0 to nvl3, each with a host name, a /dev/shm
# and four GPUs of its own, as far as programs can tell. Needs root, but no systemd and no cgroups.
#
#   up.sh FOLDER [PORT [PID]]   does nothing where FOLDER's Slurm is up; prints the SLURM_CONF to export
#
#   FOLDER  of everything it writes; made where missing, removed by down.sh
#   PORT    first of the five that it listens on, on 127.0.0.1 (16817)
#   PID     down.sh is run when this process ends, whatever way
#
# Exits with 77, as skipped tests do, where there cannot be one: no root, no Slurm, no namespaces.
set -euo pipefail
here=$(unset CDPATH && cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)
PATH=$PATH:/usr/sbin:/sbin

case ${1:-} in
  '' | -h | --help)
    sed -n '2,/^[^#]/s/^# \{0,1\}//p' -- "$0"
    exit
    ;;
esac
lab=$1 port=${2:-16817} owner=${3:-}
nodes=(nvl0 nvl1 nvl2 nvl3)
export SLURM_CONF=$lab/slurm.conf

die() {
  printf 'up.sh: %s\n' "$*" >&2
  tail -qn 5 -- "$lab"/log/* >&2 2>/dev/null || true
  exit 1
}

cannot() {
  printf 'up.sh: %s\n' "$*" >&2
  exit 77
}

[[ $lab == /* ]] || die "$lab is no absolute path"
[[ $port =~ ^[0-9]{4,5}$ ]] || die "$port is no port: 1024 to 65530"
((EUID == 0)) || cannot "must run as root: a slurmd starts tasks of any user"
for program in slurmctld slurmd srun munged; do
  command -v "$program" >/dev/null ||
    cannot "no $program: apt-get install --no-install-recommends slurmctld slurmd slurm-client munge"
done
unshare --uts --ipc --mount true 2>/dev/null ||
  cannot "no namespaces for nodes: run on a machine or in a container with --privileged"

runs() { # PIDFILE NAME
  local pid
  pid=$(cat -- "$1" 2>/dev/null) && [[ $(cat "/proc/$pid/comm" 2>/dev/null) == "$2" ]]
}

is_up() {
  local node
  for node in "${nodes[@]}"; do runs "$lab/run/$node.pid" slurmd || return 1; done
  [[ $(timeout 5 sinfo -h -r -N -t idle,mix,alloc -o %N 2>/dev/null | sort -u | wc -l) == "${#nodes[@]}" ]]
}

if is_up; then
  echo "$SLURM_CONF"
  exit
fi
[[ ! -e $lab/run ]] || "$here/down.sh" "$lab"

# The daemons outlive this script, and may hold none of its pipes.
exec 3>&1 </dev/null
mkdir -p -- "$lab"/{run,log,state,spool,tmp,gpu}
# munged looks for folders on its way that others can write.
chmod 755 -- "$lab" "$lab/run"
exec >>"$lab/log/up.log"
sed -e "s|@LAB@|$lab|g; s|@PORT@|$port|g; s|@FIRST@|$((port + 1))|g; s|@LAST@|$((port + 4))|g" \
  "$here/slurm.conf.in" >"$SLURM_CONF"
# To slurmd a GPU is a file whose name ends in a number, which becomes CUDA_VISIBLE_DEVICES.
for number in 0 1 2 3; do ln -sfn /dev/null "$lab/gpu/nvidia$number"; done
echo "NodeName=nvl[0-3] Name=gpu File=$lab/gpu/nvidia[0-3]" >"$lab/gres.conf"
{
  cat /etc/hosts
  echo "127.0.0.1 $(hostname)"
  for number in 0 1 2 3; do echo "127.0.1.$((number + 1)) nvl$number"; done
} >"$lab/hosts"
(umask 077 && head -c 128 /dev/urandom >"$lab/run/munge.key")

if [[ -n $owner ]]; then
  # shellcheck disable=SC2016 # for the shell that waits
  setsid sh -c 'tail --pid="$1" -f /dev/null; exec "$2" "$3"' sh "$owner" "$here/down.sh" "$lab" \
    2>>"$lab/log/up.log" 3>&- &
fi
{
  munged --num-threads=2 --socket="$lab/run/munge.socket" --key-file="$lab/run/munge.key" \
    --pid-file="$lab/run/munged.pid" --seed-file="$lab/run/munge.seed" --log-file="$lab/log/munged.log" \
    || die "munged did not start"
  slurmctld -c -f "$SLURM_CONF" || die "slurmctld did not start"
  for node in "${nodes[@]}"; do
    mkdir -p -- "$lab/spool/$node" "$lab/tmp/$node"
    # shellcheck disable=SC2016 # for the shell in the node
    unshare --uts --ipc --mount sh -ec '
      hostname "$1"
      mount -t tmpfs -o mode=1777 tmpfs /dev/shm
      mount --bind "$2/hosts" /etc/hosts
      exec slurmd -c -N "$1" -f "$2/slurm.conf"' sh "$node" "$lab" ||
      die "slurmd of $node did not start"
  done
} 2>>"$lab/log/up.log" 3>&-
for _ in {1..150}; do
  if is_up; then
    echo "$SLURM_CONF" >&3
    exit
  fi
  sleep 0.2
done
die "the nodes are not ready after 30 s"
