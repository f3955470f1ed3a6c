"""On which addresses a process listens, read from /proc."""

from pathlib import Path


def listening_addresses(process):
    """The local addresses, IPv4 and IPv6, of the listening TCP sockets of a process."""
    sockets = set(_sockets(process))
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{process}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in sockets:
                yield _readable(fields[1].split(":")[0])


def _sockets(process):
    for entry in Path(f"/proc/{process}/fd").iterdir():
        try:
            target = str(entry.readlink())
        except FileNotFoundError:  # closed meanwhile
            continue
        if target.startswith("socket:["):
            yield target[8:-1]


def _readable(text):
    if len(text) == 8:
        return ".".join(str(byte) for byte in reversed(bytes.fromhex(text)))
    return "::1" if text == "0" * 24 + "01000000" else text
