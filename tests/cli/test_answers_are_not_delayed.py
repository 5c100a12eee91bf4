import asyncio
import socket

from app.cli.listening import Listeners


async def test_connections_send_at_once_without_waiting_for_acknowledgements() -> None:
    listeners = Listeners("127.0.0.1", 0)
    nodelay: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    def connected(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        accepted: socket.socket = writer.get_extra_info("socket")
        nodelay.set_result(accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        writer.close()

    listeners.listen()
    (bound,) = listeners.sockets
    async with await asyncio.start_server(connected, sock=bound):
        _, writer = await asyncio.open_connection("127.0.0.1", bound.getsockname()[1])
        assert await nodelay != 0
        writer.close()
        await writer.wait_closed()
