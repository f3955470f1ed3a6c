"""A small client of the debug adapter protocol, as an editor has one: JSON over a socket, requests and events."""

import contextlib
import itertools
import json
import socket
import time


class DebugClient:
    """Talks to the debugger of one process.

    Args:
        port: on loopback.
        timeout: seconds for any one answer or event.
    """

    def __init__(self, port, timeout=30.0):
        self._socket = socket.create_connection(("127.0.0.1", port), timeout)
        self._stream = self._socket.makefile("rb")
        self._numbers = itertools.count(1)
        self._timeout = timeout
        self._unread = []

    def __enter__(self):
        return self

    def __exit__(self, *problem):
        with contextlib.suppress(OSError):
            self._stream.close()
            self._socket.close()

    def request(self, command, **arguments):
        """Sends a request and returns the body of its answer."""
        number = self.send(command, **arguments)
        answer = self._await(lambda message: message.get("request_seq") == number)
        assert answer["success"], f"{command}: {answer}"
        return answer.get("body") or {}

    def send(self, command, **arguments):
        """Sends a request whose answer comes later, such as that of ``attach``; returns its number."""
        number = next(self._numbers)
        content = json.dumps({"seq": number, "type": "request", "command": command, "arguments": arguments}).encode()
        self._socket.sendall(b"Content-Length: %d\r\n\r\n" % len(content) + content)
        return number

    def event(self, name):
        """Waits for an event and returns its body."""
        return self._await(lambda message: message.get("event") == name).get("body", {})

    def attach(self, breakpoints, **settings):
        """The handshake of an editor.

        Args:
            breakpoints: path -> lines.
            settings: of the attach request.
        """
        self.request("initialize", adapterID="debugpy", pathFormat="path", linesStartAt1=True)
        number = self.send("attach", justMyCode=True, **settings)
        self.event("initialized")
        for path, lines in breakpoints.items():
            found = self.request(
                "setBreakpoints", source={"path": str(path)}, breakpoints=[{"line": line} for line in lines]
            )
            assert all(point["verified"] for point in found["breakpoints"]), found
        self.request("configurationDone")
        self._await(lambda message: message.get("request_seq") == number)

    def stopped_at(self):
        """Waits for a stop; returns the thread and its innermost frame."""
        thread = self.event("stopped")["threadId"]
        return thread, self.request("stackTrace", threadId=thread)["stackFrames"][0]

    def value(self, expression, frame):
        """The value of an expression in a frame, as text."""
        return self.request("evaluate", expression=expression, frameId=frame["id"])["result"]

    def locals_of(self, frame):
        """The local variables of a frame: name -> text."""
        scopes = self.request("scopes", frameId=frame["id"])["scopes"]
        (inner,) = (scope for scope in scopes if scope["name"] == "Locals")
        found = self.request("variables", variablesReference=inner["variablesReference"])["variables"]
        return {variable["name"]: variable["value"] for variable in found}

    def _await(self, wanted):
        deadline = time.monotonic() + self._timeout
        for message in list(self._unread):
            if wanted(message):
                self._unread.remove(message)
                return message
        while time.monotonic() < deadline:
            message = self._read()
            if wanted(message):
                return message
            self._unread.append(message)
        raise AssertionError(f"no such message in {self._timeout} s; there were {self._unread}")

    def _read(self):
        length = 0
        while line := self._stream.readline().strip():
            name, _, value = line.partition(b":")
            if name.lower() == b"content-length":
                length = int(value)
        assert length, "the debugger has closed the connection"
        return json.loads(self._stream.read(length))
