"""Two nodes on one machine with a network between them, which may be slow or cut."""

import contextlib
import os
import subprocess

import pytest


class Network:
    """Two network namespaces, one for each node, and a link between them; rate: of each direction, as tc writes it."""

    ADDRESSES, MACS = ("10.77.0.1", "10.77.0.2"), ("02:00:00:00:77:01", "02:00:00:00:77:02")
    NOBODY = "02:00:00:00:77:99"

    def __init__(self, rate):
        self.names = [f"megarl-{os.getpid()}-{rank}" for rank in (0, 1)]
        self.rate = rate

    def __enter__(self):
        try:
            self._make()
        except (OSError, subprocess.CalledProcessError) as error:
            self.__exit__()
            why = getattr(error, "stderr", error)
            pytest.skip(f"needs iproute2 and permission to make network namespaces: {why}")
        return self

    def _make(self):
        for name in self.names:
            call(f"ip netns add {name}")
        ends = [f"name eth0 address {mac} netns {name}" for mac, name in zip(self.MACS, self.names, strict=True)]
        call(f"ip link add {ends[0]} type veth peer {ends[1]}")
        for name, address in zip(self.names, self.ADDRESSES, strict=True):
            call(f"ip -n {name} address add {address}/24 dev eth0")
            for device in ("lo", "eth0"):
                call(f"ip -n {name} link set {device} up")
            call(f"tc -n {name} qdisc add dev eth0 root tbf rate {self.rate} burst 32kbit latency 400ms")
        self.cut(False)

    def cut(self, cut):
        """Have every packet between the nodes vanish, or none: the link stays up, and nobody is told."""
        for rank in (0, 1):
            mac = self.NOBODY if cut else self.MACS[1 - rank]
            address = self.ADDRESSES[1 - rank]
            call(f"ip -n {self.names[rank]} neigh replace {address} lladdr {mac} dev eth0 nud permanent")

    def environment(self, rank):
        return {
            "MEGARL_TEST_NETWORK": f"/run/netns/{self.names[rank]}",
            "MASTER_ADDR": self.ADDRESSES[0],
            "GLOO_SOCKET_IFNAME": "eth0",
        }

    def __exit__(self, *_):
        for name in self.names:
            with contextlib.suppress(OSError, subprocess.CalledProcessError):  # it was never made
                call(f"ip netns delete {name}")


def call(command):
    subprocess.run(command.split(), check=True, capture_output=True, text=True)
