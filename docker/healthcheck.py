"""The image's health check: exit code 0 if the service in this container is ready, else 1.

It asks the port of ``DRAGOMAN_PORT`` (default 8000), so change the port by that variable and not by
``--port``. Nothing but the standard library, because it starts every few seconds.
"""

from __future__ import annotations

import http.client
import os
import sys

_TIMEOUT_S = 4


def main() -> int:
    """Ask /readyz once and print what it said."""
    port = int(os.environ.get("DRAGOMAN_PORT", "8000"))
    # http.client and not urllib: a proxy of the environment must not be asked.
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_TIMEOUT_S)
    try:
        connection.request("GET", "/readyz")
        response = connection.getresponse()
        body = response.read(1000).decode(errors="replace")
    except (OSError, http.client.HTTPException) as error:
        print(f"no answer on port {port}: {type(error).__name__}: {error}")
        return 1
    finally:
        connection.close()
    print(response.status, body)
    return 0 if response.status == http.client.OK else 1


if __name__ == "__main__":
    sys.exit(main())
