"""What the scripts here know of their servers' ports."""

import socket
import sys
import time


def wait_for(port):
    """Waits until something listens at this port of this machine. Ends the script if nothing does for a minute."""
    for _ in range(600):
        try:
            socket.create_connection(("127.0.0.1", port)).close()
            return
        except OSError:
            time.sleep(0.1)
    sys.exit(f"nothing listens at port {port}")
