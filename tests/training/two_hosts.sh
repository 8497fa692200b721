# Run a command of the shell on two machines: namespaces with a name and an address each, 10.77.0.1 and .2.
# NODE is the number of the machine. It ends with an error if the command does on either.
# Usage: sh two_hosts.sh COMMAND
set -e
if [ -z "$NODE" ]; then
    unshare -rnu true
    export NODE=0 COMMAND="$1"
    exec unshare -rnu sh "$0"
fi
hostname "machine-$NODE"
ip link set lo up
if [ "$NODE" = 0 ]; then
    NODE=1 unshare -nu sh "$0" &
    until [ "$(readlink "/proc/$!/ns/net")" != "$(readlink "/proc/$$/ns/net")" ]; do sleep 0.1; done
    ip link add to1 type veth peer name to0 netns $!
    ip addr add 10.77.0.1/24 dev to1
    ip link set to1 up
else
    until ip link show to0 >/dev/null 2>&1; do sleep 0.1; done
    ip addr add 10.77.0.2/24 dev to0
    ip link set to0 up
fi
sh -c "$COMMAND"
[ "$NODE" = 1 ] || wait $!
