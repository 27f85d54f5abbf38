"""A page of an engine, such as /metrics, read whole within a time and a size: whoever answers need not be an engine."""

import asyncio

import httpx


class PageTooLongError(httpx.ReadError):
    """It is longer than an engine's would ever be."""


async def read_page(client: httpx.AsyncClient, url: str, *, most_bytes: int, timeout_s: float) -> bytes:
    """Return a page as it was sent: nothing is unpacked, and no redirection followed.

    Raises
    ------
    httpx.HTTPError
        There is none, or not in time, or it is longer than that.
    """
    page = bytearray()
    try:
        async with (
            asyncio.timeout(timeout_s),
            client.stream("GET", url, headers={"Accept-Encoding": "identity"}) as response,
        ):
            response.raise_for_status()
            async for data in response.aiter_raw():
                page += data
                if len(page) > most_bytes:
                    raise PageTooLongError(f"longer than {most_bytes} bytes")
    except TimeoutError as error:
        raise httpx.ReadTimeout(f"not complete after {timeout_s:g} s") from error
    return bytes(page)
