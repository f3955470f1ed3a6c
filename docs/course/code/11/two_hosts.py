"""Starts one command twice, as two hosts would: {node} becomes 0 or 1, and {port} a port that is free."""

import os
import secrets
import socket
import subprocess
import sys

with socket.socket() as probe:
    probe.bind(("127.0.0.1", 0))
    port = probe.getsockname()[1]
token = {"LOCKSTEP_TOKEN": secrets.token_hex(32)}  # the secret of Lockstep's hosts; each run here has its own
hosts = []
for node in ("0", "1"):
    words = [word.replace("{node}", node).replace("{port}", str(port)) for word in sys.argv[1:]]
    hosts.append(
        subprocess.Popen(
            words,
            env={**os.environ, "OMP_NUM_THREADS": "1", **token},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
    )
for node, host in enumerate(hosts):
    output, errors = host.communicate(timeout=120)
    print(f"host {node}, exit code {host.returncode}:", output.strip() or "(prints nothing)")
    if host.returncode:
        print(errors.strip())
