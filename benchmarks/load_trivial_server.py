"""A server that answers at once and always the same: what the load client can do at most.

python -m benchmarks.load_trivial_server --port N
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re

_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)\r\n", re.IGNORECASE)
_ANSWER = json.dumps(
    {
        "texts": [{"text": "x" * 150, "segments": [{"target": "x" * 150, "num_target_tokens": 33}]}],
        "timings": {"total_s": 0.0, "queue_s": 0.0, "decode_s": 0.0},
    }
).encode("utf-8")
_RESPONSE = (
    b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(_ANSWER)
) + _ANSWER


class TrivialServer(asyncio.Protocol):
    """Reads whole requests, looks at nothing, answers each."""

    def __init__(self) -> None:
        """Wait for a connection."""
        self._received = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the connection."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Answer when a request is whole."""
        self._received += data
        end = self._received.find(b"\r\n\r\n")
        length = _LENGTH.search(self._received[: end + 2])
        if end >= 0 and length is not None and len(self._received) >= end + 4 + int(length[1]):
            self._received = b""
            self._transport.write(_RESPONSE)


async def _serve(port: int) -> None:
    server = await asyncio.get_running_loop().create_server(TrivialServer, "127.0.0.1", port)
    await server.serve_forever()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    asyncio.run(_serve(parser.parse_args().port))
