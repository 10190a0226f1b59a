#!/bin/bash
# usage: tests/engines/slurm.sh start FOLDER [NODES]  a Slurm cluster of two nodes (or more), all this machine, on loopback; in FOLDER
#        tests/engines/slurm.sh stop FOLDER    ends it; FOLDER is removed
#        tests/engines/slurm.sh down FOLDER N  kill -9 of node N (1, 2, ...) with all that runs there; Slurm is told that it is down
#        tests/engines/slurm.sh up FOLDER N    the node is back
# A job in the partition `urgent` preempts those in `short`, which have 20 seconds then and are queued again.
# As root. `export SLURM_CONF=FOLDER/slurm.conf` to use it.
set -euo pipefail
[ $# -ge 2 ] || { sed -n 2,7p "$0"; exit 2; }
what=$1 folder=$(realpath -m "$2")
MARK=.started-by-panax-tests

free_ports() {
    python3 -c "
import socket
opened = [socket.create_server(('127.0.0.1', 0)) for _ in range($1)]
print(*(each.getsockname()[1] for each in opened))"
}

end() {
    # What a pid file names, and all that it started.
    local pid
    pid=$(cat "$1" 2>/dev/null) || return 0
    kill "$pid" 2>/dev/null || return 0
    for _ in $(seq 50); do kill -0 "$pid" 2>/dev/null || return 0; sleep 0.1; done
    kill -9 "$pid" 2>/dev/null || true
}

case $what in
start)
    [ "$(id -u)" = 0 ] || { echo "expected root: slurmd starts jobs as other users"; exit 1; }
    for each in munged slurmctld slurmd srun; do
        command -v $each >/dev/null || { echo "$each is missing; run tests/engines/install.sh slurm"; exit 1; }
    done
    [ ! -e "$folder" ] || { echo "$folder is there already; choose a new folder, or stop its cluster"; exit 1; }
    mkdir -p "$folder"/state
    count=${3:-2}
    echo "$count" >"$folder/$MARK"
    chmod 755 "$folder"
    read -r -a ports <<<"$(free_ports $((count + 1)))"
    head -c 1024 /dev/urandom >"$folder/munge.key"
    chmod 600 "$folder/munge.key"
    cat >"$folder/slurm.conf" <<EOF
ClusterName=panax
SlurmctldHost=$(hostname -s)(127.0.0.1)
SlurmctldPort=${ports[0]}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket=$folder/munge.socket
CredType=cred/munge
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
ReturnToService=2
SlurmdParameters=config_overrides
SlurmctldTimeout=30
SlurmdTimeout=20
InactiveLimit=0
KillWait=10
SchedulerParameters=batch_sched_delay=0,sched_interval=5
StateSaveLocation=$folder/state
SlurmdSpoolDir=$folder/spool%n
SlurmctldPidFile=$folder/slurmctld.pid
SlurmdPidFile=$folder/slurmd%n.pid
SlurmctldLogFile=$folder/slurmctld.log
SlurmdLogFile=$folder/slurmd%n.log
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=short Nodes=panax[1-$count] Default=YES MaxTime=01:00:00 DefaultTime=00:20:00 State=UP PriorityTier=1 GraceTime=20
PartitionName=urgent Nodes=panax[1-$count] MaxTime=01:00:00 DefaultTime=00:20:00 State=UP PriorityTier=2
EOF
    for n in $(seq "$count"); do
        echo "NodeName=panax$n NodeHostname=$(hostname -s) NodeAddr=127.0.0.1 Port=${ports[$n]} CPUs=2 RealMemory=2000 State=UNKNOWN"
    done >>"$folder/slurm.conf"
    export SLURM_CONF=$folder/slurm.conf
    (umask 022; munged --key-file="$folder/munge.key" --socket="$folder/munge.socket" --pid-file="$folder/munged.pid" \
        --log-file="$folder/munged.log" --seed-file="$folder/munge.seed" --force >/dev/null 2>&1)
    slurmctld >/dev/null
    for n in $(seq "$count"); do slurmd -N "panax$n" >/dev/null; done
    for _ in $(seq 100); do
        [ "$(sinfo -h -o %T 2>/dev/null | sort -u)" != idle ] || { echo "export SLURM_CONF=$folder/slurm.conf"; exit 0; }
        sleep 0.2
    done
    sinfo || true
    tail -n 5 "$folder"/*.log
    "$0" stop "$folder"
    exit 1
    ;;
stop)
    # Another cluster's folder has a slurm.conf too: nothing is ended or removed that was not started here.
    [ -e "$folder/$MARK" ] || { echo "$folder does not hold a cluster that this script has started"; exit 1; }
    export SLURM_CONF=$folder/slurm.conf
    timeout 10 scancel --user="$(id -un)" 2>/dev/null || true
    for _ in $(seq 50); do [ -n "$(timeout 5 squeue -h 2>/dev/null)" ] || break; sleep 0.2; done
    for n in $(seq "$(cat "$folder/$MARK")"); do end "$folder/slurmdpanax$n.pid"; done
    end "$folder/slurmctld.pid"
    end "$folder/munged.pid"
    rm -rf "$folder"
    ;;
down)
    # The daemon and what runs there: each task has its node in its environment, and is a child of a slurmstepd. All stop at
    # one moment, as when the power fails: an srun's helper ends the step when srun has died. Children are killed first, since
    # the kernel lets orphans that are stopped go on.
    export SLURM_CONF=$folder/slurm.conf
    lost=$(cat "$folder/slurmdpanax$3.pid")
    for each in /proc/[0-9]*; do
        grep -qz "^SLURMD_NODENAME=panax$3$" "$each/environ" 2>/dev/null || continue
        grep -qz "^SLURM_CONF=$folder/slurm.conf$" "$each/environ" 2>/dev/null || continue
        parent=$(awk '/^PPid:/ { print $2 }' "$each/status" 2>/dev/null) || continue
        lost="$lost ${each#/proc/}"
        ! grep -q "^slurmstepd" "/proc/$parent/comm" 2>/dev/null || lost="$lost $parent"
    done
    for signal in STOP KILL; do
        for each in $(printf '%s\n' $lost | sort -rn); do kill -$signal "$each" 2>/dev/null || true; done
    done
    scontrol update "nodename=panax$3" state=down reason=lost
    ;;
up)
    export SLURM_CONF=$folder/slurm.conf
    slurmd -N "panax$3" >/dev/null
    for _ in $(seq 100); do
        # A job that waits for it may have it at once.
        [[ ! "$(sinfo -h -n "panax$3" -p short -o %T)" =~ ^(idle|mixed|allocated)$ ]] || exit 0
        sleep 0.2
    done
    sinfo
    exit 1
    ;;
*) sed -n 2,7p "$0"; exit 2 ;;
esac
