#!/bin/sh
# Process 1 of the guest. The kernel's command line sets HOST, HOSTS and, with two hosts, PEER.
# Three virtio ports lead to the host: 1 and 2 are the command's standard output and error; on 3 this script writes
# `ready UPTIME` and `exit STATUS`. When something fails here, the guest prints it on the console and powers off without
# a status.
export PATH=/usr/local/bin:/usr/bin:/usr/sbin HOME=/root
fail() { echo "init: $*" >/dev/console; echo o >/proc/sysrq-trigger; sleep 60; }

mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev
mkdir -p /dev/shm /dev/pts
mount -t tmpfs -o mode=1777 shm /dev/shm
mount -t devpts pts /dev/pts
ln -sf /proc/self/fd /dev/fd
ln -sf /proc/self/fd/1 /dev/stdout
ln -sf /proc/self/fd/2 /dev/stderr
exec </dev/null >/dev/console 2>&1
echo 1 >/proc/sys/kernel/sysrq

for module in /lib/guest/*.ko; do insmod "$module" || fail "insmod $module"; done

hostname "host$HOST"
ulimit -l unlimited
ip link set lo up
# Without duplicate address detection, addresses and the GIDs made from them are usable as soon as they are set.
echo 0 >/proc/sys/net/ipv6/conf/all/accept_dad
echo 0 >/proc/sys/net/ipv6/conf/default/accept_dad
# With one host, eth0 and eth1 are connected to each other: accept packets whose source is an address of this host.
echo 1 >/proc/sys/net/ipv4/conf/all/accept_local
# eth0 gets its address last: a peer that replies to a ping there is completely set up.
for i in 1 0; do
  [ -e /sys/class/net/eth$i ] || fail "no eth$i"
  echo 0 >/proc/sys/net/ipv6/conf/eth$i/accept_dad
  ip link set eth$i mtu 4200 up || fail "cannot bring up eth$i"
  rdma link add r$i type rxe netdev eth$i || fail "no rxe device on eth$i"
  ip addr add 10.7$((7 + i)).0.$((1 + HOST))/24 dev eth$i || fail "no address on eth$i"
done
if [ "$HOSTS" = 2 ]; then
  until ping -c 1 -W 1 "$PEER" >/dev/null 2>&1; do sleep 0.1; done
fi

until [ -e /dev/vport*p3 ]; do sleep 0.05; done
exec 3>"$(echo /dev/vport*p3)"
# Through pipes: a port can be opened only once, and a terminal would change the bytes.
mkfifo /run/stdout /run/stderr
cat /run/stdout >"$(echo /dev/vport*p1)" & out=$!
cat /run/stderr >"$(echo /dev/vport*p2)" & err=$!
read -r uptime rest </proc/uptime
echo "ready $uptime" >&3
cd /tmp
sh /etc/command >/run/stdout 2>/run/stderr 3>&-
status=$?
# Processes that the command left running would keep the pipes open: kill them.
for process in /proc/[0-9]*; do
  process=${process#/proc/}
  case " 1 $out $err " in *" $process "*) ;; *) kill -9 "$process" 2>/dev/null ;; esac
done
wait $out $err
echo "exit $status" >&3
# The other host may still communicate with this one. xtask ends the guests.
while :; do sleep 1000; done
