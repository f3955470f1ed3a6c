"""A slow cable between two network namespaces: packets come late, not all of them, and only so many a second.

    python wire.py SPACE_A ADDRESS_A SPACE_B ADDRESS_B DELAY_SECONDS MEGABITS LOSS

Reads each packet from a tunnel device in one namespace and writes it into the other when it is due. Says ``ready``.
"""

import contextlib
import ctypes
import fcntl
import heapq
import os
import random
import select
import struct
import subprocess
import sys
import time

_NEW_NETWORK = 0x40000000
_SET_INTERFACE, _TUNNEL, _BARE_PACKETS = 0x400454CA, 0x0001, 0x1000
_LONGEST_QUEUE = 0.2  # seconds
_BATCH = 64


def tunnel(space, address, name="wire"):
    """Makes a device in a namespace, and returns the end that this process holds."""
    libc = ctypes.CDLL(None, use_errno=True)
    home, other = (os.open(path, os.O_RDONLY) for path in ("/proc/self/ns/net", f"/run/netns/{space}"))
    if libc.setns(other, _NEW_NETWORK):
        raise OSError(ctypes.get_errno(), f"setns {space}")
    end = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(end, _SET_INTERFACE, struct.pack("16sH22x", name.encode(), _TUNNEL | _BARE_PACKETS))
    subprocess.check_call(["ip", "addr", "add", f"{address}/24", "dev", name])
    subprocess.check_call(["ip", "link", "set", name, "up"])
    libc.setns(home, _NEW_NETWORK)
    os.close(home)
    os.close(other)
    return end


def carry(ends, delay, bytes_per_second, loss):
    """Passes packets on until this process ends."""
    draw = random.Random(0)
    free = dict.fromkeys(ends, 0.0)
    queue, count = [], 0
    while True:
        while queue and queue[0][0] <= time.monotonic():
            _, _, to, packet = heapq.heappop(queue)
            with contextlib.suppress(OSError):
                os.write(to, packet)
        wait = max(0.0, queue[0][0] - time.monotonic()) if queue else None
        for end in select.select(ends, [], [], wait)[0]:
            other = ends[1] if end == ends[0] else ends[0]
            for packet in packets(end):
                begin = max(free[end], now := time.monotonic())
                if draw.random() < loss or begin - now > _LONGEST_QUEUE:
                    continue
                free[end] = begin + len(packet) / bytes_per_second
                count += 1
                heapq.heappush(queue, (free[end] + delay, count, other, packet))


def packets(end):
    with contextlib.suppress(BlockingIOError):
        for _ in range(_BATCH):
            yield os.read(end, 65536)


def main():
    first, second = tunnel(*sys.argv[1:3]), tunnel(*sys.argv[3:5])
    delay, megabits, loss = map(float, sys.argv[5:])
    print("ready", flush=True)
    carry((first, second), delay, megabits * 1e6 / 8, loss)


if __name__ == "__main__":
    main()
