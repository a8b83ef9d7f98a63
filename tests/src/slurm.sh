#!/bin/sh
# A Slurm cluster in its own namespaces: Debian's slurmctld, three slurmd, and slurmdbd with MariaDB; two
# rgpu-servers with two software GPUs each, and one vhost-rgpu. The arguments are a folder for logs and sockets,
# the folders of the executables, of the guest libraries and of the programs, and the script rgpu-slurm. The
# shell is the first process of the PID namespace.
set -eu
folder=$1 script=$5
# Other users' jobs use these folders, and may not look into a source tree in root's home.
mount -t tmpfs -o mode=755 tmpfs /srv
mkdir /srv/binaries /srv/libraries /srv/programs
mount --bind "$2" /srv/binaries
mount --bind "$3" /srv/libraries
mount --bind "$4" /srv/programs
binaries=/srv/binaries libraries=/srv/libraries
hostname slurm
ip link set lo up
# slurmd finds no address to listen at without an interface that is not loopback.
ip link add d0 type dummy 2>/dev/null || ip link add d0 type veth peer name d1
ip addr add 10.99.0.1/24 dev d0
ip link set d0 up
printf '127.0.0.1 localhost slurm\n' >"$folder/hosts"
mount --bind "$folder/hosts" /etc/hosts
for place in /etc/slurm /etc/munge /etc/rgpu /run /var/lib/munge /var/log/munge /var/spool /var/lib/mysql; do
	mkdir -p "$place"
	mount -t tmpfs -o mode=755 tmpfs "$place"
done
mkdir -p /run/munge /run/rgpu /run/mysqld /var/spool/ctld
chown munge: /run/munge /var/lib/munge /var/log/munge /etc/munge
head -c 1024 /dev/urandom >/etc/munge/munge.key
chown munge: /etc/munge/munge.key
chmod 400 /etc/munge/munge.key
setpriv --reuid munge --regid munge --clear-groups munged

# Temporary files are named after the process, whose number is the same in another test's namespaces.
options='--user=root --datadir=/var/lib/mysql --tmpdir=/run/mysqld'
# shellcheck disable=SC2086 # several options
mariadb-install-db --no-defaults $options --auth-root-authentication-method=socket >"$folder/mariadb.log" 2>&1
# shellcheck disable=SC2086
mariadbd --no-defaults $options --socket=/run/mysqld/mysqld.sock --skip-networking >>"$folder/mariadb.log" 2>&1 &
until mariadb --no-defaults -S /run/mysqld/mysqld.sock -e 'create database slurm_acct_db' 2>/dev/null; do sleep 0.2; done
cat >/etc/slurm/slurmdbd.conf <<END
AuthType=auth/munge
DbdHost=localhost
SlurmUser=root
StorageType=accounting_storage/mysql
StorageUser=root
StorageLoc=slurm_acct_db
LogFile=$folder/slurmdbd.log
PidFile=/run/slurmdbd.pid
END
chmod 600 /etc/slurm/slurmdbd.conf
slurmdbd

cp "$script" /etc/rgpu/
cat >/etc/rgpu/slurm.conf <<END
OPTIONS=--insecure
WAIT=1
LIBRARIES=$libraries
PATH=\$PATH:$binaries
END
cat >/etc/rgpu/clients.toml <<END
exclusive_leases = true
lease_required = true
END
echo 'servers = ["127.0.0.1:9701", "127.0.0.1:9702"]' >/etc/rgpu/pool.toml
for number in 1 2; do
	"$binaries/rgpu-server" --insecure --backend software --software-devices 2 --software-memory 1G \
		--listen "tcp:127.0.0.1:970$number" --clients /etc/rgpu/clients.toml --status-socket "$folder/status$number" \
		--admin-socket "$folder/admin$number" 2>"$folder/server$number.log" &
done
"$binaries/vhost-rgpu" --insecure --native-socket /run/rgpu/native.sock --native-mode 0o666 --server tcp:127.0.0.1:9701 \
	--named-servers tcp:127.0.0.1:9702 --status-socket "$folder/vhost.status" 2>"$folder/vhost.log" &

cat >/etc/slurm/slurm.conf <<END
ClusterName=test
SlurmctldHost=slurm(127.0.0.1)
SlurmUser=root
AuthType=auth/munge
MailProg=/bin/true
StateSaveLocation=/var/spool/ctld
SlurmdSpoolDir=/var/spool/%n
SlurmctldPidFile=/run/slurmctld.pid
SlurmdPidFile=/run/slurmd.%n.pid
SlurmctldLogFile=$folder/slurmctld.log
SlurmdLogFile=$folder/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
MessageTimeout=30
UnkillableStepTimeout=600
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=localhost
AccountingStorageTRES=gres/rgpu,gres/rgpumem
GresTypes=rgpu,rgpumem
Prolog=/etc/rgpu/rgpu-slurm
Epilog=/etc/rgpu/rgpu-slurm
TaskProlog=/etc/rgpu/rgpu-slurm
PrologFlags=Alloc
NodeName=n[1-2] NodeHostname=slurm NodeAddr=127.0.0.1 Port=[17001-17002] CPUs=2 RealMemory=100 Gres=rgpu:4,rgpumem:4G
NodeName=n3 NodeHostname=slurm NodeAddr=127.0.0.1 Port=17003 CPUs=2 RealMemory=100 Gres=rgpu:rgpu_software:3,rgpu:h100:1,rgpumem:4G
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
END
cat >/etc/slurm/gres.conf <<END
NodeName=n[1-2] Name=rgpu Count=4
NodeName=n3 Name=rgpu Type=rgpu_software Count=3
NodeName=n3 Name=rgpu Type=h100 Count=1
NodeName=n[1-3] Name=rgpumem Count=4G
END
echo 'CgroupAutomount=no' >/etc/slurm/cgroup.conf
# slurmd ends where it finds both kinds of control groups, as in a container with the unified hierarchy on a
# kernel that uses the others. There it gets to see the others.
if [ "$(stat -f -c %T /sys/fs/cgroup)" = cgroup2fs ] && grep -q '^[1-9]' /proc/self/cgroup; then
	mount -t tmpfs -o mode=755 tmpfs /sys/fs/cgroup
	while IFS=: read -r _ controllers _; do
		[ -n "$controllers" ] || continue
		mkdir "/sys/fs/cgroup/${controllers#name=}"
		mount -t cgroup -o "$controllers" cgroup "/sys/fs/cgroup/${controllers#name=}"
	done </proc/self/cgroup
fi
until sacctmgr -i add cluster test >/dev/null 2>&1; do sleep 0.2; done
slurmctld
# slurmctld 22.05 counts GRES without a type as used for good on nodes that register after one with types.
for node in n1 n2; do slurmd -N "$node"; done
until [ "$(sinfo -h -N -n n1,n2 -o %T | sort -u)" = idle ]; do sleep 0.2; done
slurmd -N n3
sleep infinity &
wait $!
