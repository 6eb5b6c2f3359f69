"""Inputs on object stores and web servers, read through fsspec."""

from __future__ import annotations

import glob
import io
import re
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from typing import Any, Final
from urllib.parse import urlsplit

from tridock.data.digest import SUMS
from tridock.errors import Problem, RequestError
from tridock.extras import install_command

_PIPES: Final = {
    **dict.fromkeys(("s3", "s3a"), "aws s3 cp {} -"),
    **dict.fromkeys(("gs", "gcs"), "gcloud storage cat {}"),
    **dict.fromkeys(("http", "https"), "curl -fL {}"),
}
"""Commands that write a file to standard output, by protocol."""
_TIMEOUT_S: Final = 60.0


def is_url(given: str) -> bool:
    return "://" in given


def url_name(url: str) -> str:
    """Returns a URL without user, password and query, which may hold a signature."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


def find_urls(url: str) -> list[str]:
    """Returns the files that a URL names: itself, those that match a pattern, or those below a folder, by name.

    Raises :class:`RequestError` if there is none, or if they cannot be listed.
    """
    with _explained(url):
        system, path = _system(url)
        if _is_web(url) or not (glob.has_magic(path) or system.isdir(path)):
            return [url]
        names = system.glob(path) if glob.has_magic(path) else [path]
        files = [file for name in names for file in (system.find(name) if system.isdir(name) else [name])]
        kept = [it for it in files if "/." not in f"/{it.removeprefix(path)}" and not it.endswith(f"/{SUMS}")]
        if not kept:
            raise FileNotFoundError
        return [system.unstrip_protocol(name) for name in sorted(dict.fromkeys(kept))]


class RemoteFile(io.RawIOBase):
    """A file at a URL, read from its start. Raises :class:`RequestError` whatever goes wrong on the way."""

    def __init__(self, url: str) -> None:
        self._url = url
        with _explained(url):
            system, path = _system(url)
            self._file = system.open(path, "rb", **({"block_size": 0} if _is_web(url) else {}))  # 0: in one piece

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        with _explained(self._url):
            data: bytes = self._file.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        if not self.closed and hasattr(self, "_file"):
            self._file.close()
        super().close()


def _system(url: str) -> tuple[Any, str]:
    from fsspec.core import url_to_fs

    options = {}
    if _is_web(url):
        from aiohttp import ClientTimeout

        options["client_kwargs"] = {"timeout": ClientTimeout(sock_connect=_TIMEOUT_S, sock_read=_TIMEOUT_S)}
    system, path = url_to_fs(url, **options)
    return system, path


def _is_web(url: str) -> bool:
    """Whether the extra ``remote`` has the library. In such a URL a ``?`` begins a query, not a pattern."""
    return urlsplit(url).scheme in ("http", "https")


@contextmanager
def _explained(url: str) -> Iterator[None]:
    """Converts the exceptions of fsspec and of what it uses, which are of many types."""
    name = url_name(url)
    try:
        yield
    except RequestError:
        raise
    except ImportError as error:
        pipe = _PIPES.get(urlsplit(url).scheme, "COMMAND {}").format(shlex.quote(name))
        install = f"{install_command('aiohttp')}, or " if _is_web(url) else ""
        todo = f"{install}give it through a pipe: {pipe} | tridock data preprocess --input - …"
        raise RequestError(Problem(name, "needs a library that is not installed", str(error), todo)) from None
    except Exception as error:
        cause = error.__cause__ or error  # fsspec says of any failed connection that no file was found
        if isinstance(cause, FileNotFoundError) or getattr(cause, "status", None) == HTTPStatus.NOT_FOUND:
            raise RequestError(Problem(name, "names no file", "", "correct the URL")) from None
        got = re.sub(r"\?\S*", "", str(cause)) or type(cause).__name__  # a query may hold a signature
        todo = "check the URL, the network and the credentials, and start from the beginning"
        raise RequestError(Problem(name, "cannot be read", got, todo)) from None
