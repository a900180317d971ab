"""The two programs of an exercise exchange values over TCP: RDMA does not define how programs find each other."""

import json
import socket


class Exchange:
    def __init__(self, role, port):
        if role == "server":
            with socket.create_server(("127.0.0.1", port)) as listener:
                self.connection, _ = listener.accept()
        else:
            self.connection = socket.create_connection(("127.0.0.1", port))
        self.lines = self.connection.makefile("r")

    def exchange(self, mine):
        """Sends a value to the other program and returns its value."""
        self.connection.sendall((json.dumps(mine) + "\n").encode())
        line = self.lines.readline()
        if not line:
            raise SystemExit("exchange: the other program has ended")
        return json.loads(line)

    def barrier(self):
        """Returns when both programs have called it."""
        self.exchange(None)
