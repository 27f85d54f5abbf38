"""Which connections are made in a network namespace: TCP, as `SOURCE DESTINATION PORT`, each once.

It runs inside the namespace, alone: `python traffic_recorder.py FILE`, until it is ended.
"""

import ctypes
import ipaddress
import socket
import struct
import sys
from pathlib import Path

_ALL_PROTOCOLS = 0x0003  # ETH_P_ALL: with those that leave by an interface
_SO_ATTACH_FILTER = 26
_IPV4 = 0x0800
_OPENING = (
    (0x30, 0, 0, 9),  # the protocol
    (0x15, 0, 5, 6),  # TCP, or none of ours
    (0xB1, 0, 0, 0),  # past the header of IP
    (0x50, 0, 0, 13),  # the flags of TCP
    (0x54, 0, 0, 0x12),
    (0x15, 0, 1, 0x02),  # SYN without ACK
    (0x06, 0, 0, 0xFFFF),
    (0x06, 0, 0, 0),
)
"""A filter of the kernel (linux/filter.h): only what opens a connection is handed to us."""


def record(file: Path) -> None:
    """Write down each connection that is opened, as soon as it is."""
    seen: set[str] = set()
    with socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, socket.htons(_ALL_PROTOCOLS)) as wire:
        code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *each) for each in _OPENING))
        wire.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("HL", len(_OPENING), ctypes.addressof(code)))
        with file.open("w", buffering=1) as log:
            print("recording", file=log)
            while True:
                packet, (interface, protocol, *_) = wire.recvfrom(128)
                if interface == "lo" or protocol != _IPV4:
                    continue
                source, destination = (ipaddress.ip_address(packet[at : at + 4]) for at in (12, 16))
                start = 4 * (packet[0] & 0xF)
                (port,) = struct.unpack_from("!H", packet, start + 2)
                line = f"{source} {destination} {port}"
                if line not in seen:
                    seen.add(line)
                    print(line, file=log)


if __name__ == "__main__":
    record(Path(sys.argv[1]))
