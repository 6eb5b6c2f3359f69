"""tridock data fetch against an HTTP server of the test's own: hashes, mirrors, downloads that are cut off."""

from __future__ import annotations

import hashlib
import re
import shlex
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tridock.cli import main
from tridock.data import fetch
from tridock.data.fetch import KNOWN, Wanted
from tridock.experiment import load_experiment

CONTENT = bytes(range(256)) * 4096
HASH = hashlib.sha256(CONTENT).hexdigest()


@dataclass
class Site:
    """What the server has, and what it was asked for."""

    address: str = ""
    files: dict[str, bytes] = field(default_factory=dict)
    cut_off: list[int] = field(default_factory=list)
    """Bytes after which each of the next answers ends."""
    asked: list[tuple[str, str | None]] = field(default_factory=list)


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    own = Site(files={"/c.jsonl": CONTENT})

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            own.asked.append((self.path, self.headers.get("Range")))
            content = own.files.get(self.path)
            if content is None:
                self.send_error(404)
                return
            tag = f'"{hashlib.md5(content).hexdigest()}"'
            start = 0
            if (wanted := self.headers.get("Range")) and self.headers.get("If-Range", tag) == tag:
                start = int(wanted.removeprefix("bytes=").rstrip("-"))
                if start >= len(content):
                    self.send_error(416)
                    return
            self.send_response(206 if start else 200)
            self.send_header("ETag", tag)
            self.send_header("Content-Length", str(len(content) - start))
            self.end_headers()
            end = own.cut_off.pop(0) if own.cut_off else len(content)
            self.wfile.write(content[start : start + end])

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    own.address = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    monkeypatch.setattr(fetch, "_PAUSES_S", (0.0, 0.0))
    monkeypatch.delenv("TRIDOCK_DATA_MIRRORS", raising=False)
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    yield own
    server.shutdown()
    server.server_close()


def fetched(*argv: str) -> int:
    return main(["data", "fetch", *argv])


def test_a_file_and_the_hash_that_it_must_have_from_then_on(
    site: Site, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    here = ("--folder", str(tmp_path / "raw"))
    target = tmp_path / "raw/c.jsonl"
    assert fetched(f"{site.address}/c.jsonl", *here) == 0
    assert target.read_bytes() == CONTENT
    sums = tmp_path / "raw/SHA256SUMS"
    assert sums.read_text() == f"{HASH}  c.jsonl\n"
    assert capsys.readouterr().out == (
        f"{target}: 1,048,576 bytes from {site.address}/c.jsonl, SHA-256 {HASH}, "
        f"recorded in {sums}: compare it with its publisher's\n"
    )
    assert fetched(f"{site.address}/c.jsonl", *here) == 0
    assert capsys.readouterr().out == f"{target}: already here, SHA-256 {HASH}\n"
    assert len(site.asked) == 1

    target.unlink()
    site.files["/c.jsonl"] = b"other"
    assert fetched(f"{site.address}/c.jsonl", *here) == 2
    other = hashlib.sha256(b"other").hexdigest()
    assert capsys.readouterr().err.splitlines() == [
        f"{site.address}/c.jsonl: has another content than SHA-256 {HASH}; got {other}; name another source of c.jsonl",
        f"{target}: no source has it; see above, name a mirror with --mirror or TRIDOCK_DATA_MIRRORS, "
        "or copy the file there yourself",
    ]
    assert [path.name for path in target.parent.iterdir()] == ["SHA256SUMS"]


def test_the_query_of_an_address_is_secret(site: Site, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    site.files["/c.jsonl?token=x"] = CONTENT
    addresses = (f"{site.address}/c.jsonl?token=x", f"{site.address}/none.txt?token=x")
    assert fetched(*addresses, "--folder", str(tmp_path)) == 2
    printed = capsys.readouterr()
    assert f"from {site.address}/c.jsonl, SHA-256" in printed.out
    assert f"{site.address}/none.txt: is refused" in printed.err
    assert "token" not in printed.out + printed.err


def test_what_is_here_with_another_content(site: Site, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "c.jsonl").write_bytes(b"other")
    assert fetched(f"{site.address}/c.jsonl", "--folder", str(tmp_path), "--sha256", HASH) == 2
    assert f"{tmp_path}/c.jsonl: has another content than SHA-256 {HASH}; got " in capsys.readouterr().err
    assert site.asked == []


def test_a_download_that_is_cut_off_continues_by_itself(site: Site, tmp_path: Path) -> None:
    site.cut_off = [300_000, 300_000]
    assert fetched(f"{site.address}/c.jsonl", "--folder", str(tmp_path)) == 0
    assert (tmp_path / "c.jsonl").read_bytes() == CONTENT
    assert [wanted for _, wanted in site.asked] == [None, "bytes=300000-", "bytes=600000-"]


@pytest.mark.parametrize("changed", [False, True])
def test_the_next_call_continues_unless_the_file_has_changed(
    site: Site, tmp_path: Path, capsys: pytest.CaptureFixture[str], changed: bool
) -> None:
    site.cut_off = [1000, 0, 0]
    assert fetched(f"{site.address}/c.jsonl", "--folder", str(tmp_path)) == 2
    todo = "run it again to resume"
    assert f"{site.address}/c.jsonl: was cut off; got 1,000 of 1,048,576 bytes; {todo}\n" in capsys.readouterr().err
    content = CONTENT[::-1] if changed else CONTENT
    site.files["/c.jsonl"] = content
    assert fetched(f"{site.address}/c.jsonl", "--folder", str(tmp_path)) == 0
    assert (tmp_path / "c.jsonl").read_bytes() == content
    assert site.asked[-1] == ("/c.jsonl", "bytes=1000-")


def test_a_wrong_beginning_is_fetched_again(site: Site, tmp_path: Path) -> None:
    """With a hash, a part is continued from any source: its beginning may be another file's."""
    (tmp_path / ".c.jsonl.part").write_bytes(b"x" * 1000)
    assert fetched(f"{site.address}/c.jsonl", "--folder", str(tmp_path), "--sha256", HASH) == 0
    assert (tmp_path / "c.jsonl").read_bytes() == CONTENT
    assert [wanted for _, wanted in site.asked] == ["bytes=1000-", None]


@pytest.mark.parametrize("how", ["whole", "a link"])
def test_a_part_that_is_another_file_is_not_written(
    site: Site, tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It became whole between the opening and the lock; or it is a link to somebody's file."""
    part, other = tmp_path / ".c.jsonl.part", tmp_path / "other"
    other.write_bytes(b"kept")
    if how == "a link":
        part.symlink_to(other)
    else:
        part.hardlink_to(other)
        monkeypatch.setattr(fetch.fcntl, "flock", lambda *_: part.unlink())
    assert fetched(f"{site.address}/c.jsonl", "--folder", str(tmp_path)) == 2
    assert f"{part}: " in capsys.readouterr().err
    assert other.read_bytes() == b"kept"
    assert site.asked == []


def test_mirrors_come_first_and_need_not_have_everything(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    vocabulary, merges = b"{}", b"#version: 0.2\n"
    files = [
        Wanted(f"{site.address}/own/{name}", name, hashlib.sha256(content).hexdigest())
        for name, content in (("gpt2-vocab.json", vocabulary), ("gpt2-merges.txt", merges))
    ]
    monkeypatch.setattr(fetch, "KNOWN", {"gpt2": tuple(files)})
    share = tmp_path / "share"
    share.mkdir()
    (share / "gpt2-vocab.json").write_bytes(vocabulary)
    site.files |= {"/mirror/gpt2-vocab.json": b"damaged", "/own/gpt2-merges.txt": merges}
    monkeypatch.setenv("TRIDOCK_DATA_MIRRORS", f"{site.address}/mirror/ {share}")
    folder = tmp_path / "data"
    assert fetched("gpt2", "--folder", str(folder)) == 0
    assert ((folder / "gpt2-vocab.json").read_bytes(), (folder / "gpt2-merges.txt").read_bytes()) == (
        vocabulary,
        merges,
    )
    assert [path for path, _ in site.asked] == [
        "/mirror/gpt2-vocab.json", "/mirror/gpt2-merges.txt", "/own/gpt2-merges.txt",
    ]  # fmt: skip
    assert f"from {share}/gpt2-vocab.json, SHA-256" in capsys.readouterr().out


def test_the_guide_brings_what_the_experiments_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """docs/guides/gpt2.md up to the training, from a mirror with a small tokenizer and a small corpus."""
    import pyarrow
    from pyarrow import parquet

    share = tmp_path / "share"
    texts = ["a b a b"] * 20
    (tmp_path / "c.jsonl").write_text("".join(f'{{"text": "{text}"}}\n' for text in texts))
    train = ["train-tokenizer", "--input", str(tmp_path / "c.jsonl"), "--vocab-size", "258", "--output", str(share)]
    assert main(["data", *train]) == 0
    known = [
        Wanted("http://127.0.0.1:9/x", f"gpt2-{name}", fetch.sha256_of((share / name).rename(share / f"gpt2-{name}")))
        for name in ("vocab.json", "merges.txt")
    ]
    monkeypatch.setattr(fetch, "KNOWN", {"gpt2": tuple(known)})
    parquet.write_table(pyarrow.table({"text": texts}), share / "0000.parquet")
    monkeypatch.setenv("TRIDOCK_DATA_MIRRORS", str(share))
    monkeypatch.chdir(tmp_path)
    page = (Path(__file__).parents[3] / "docs/guides/gpt2.md").read_text().partition("## 4. Train")[0]
    commands = re.findall(r"^```sh\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    for command in "".join(commands).replace("\\\n", "").replace("--workers 8", "--workers 1").splitlines():
        assert main(shlex.split(command)[1:]) == 0, capsys.readouterr().err
    assert "token 0 ends every document" in capsys.readouterr().out
    experiment = load_experiment(Path(__file__).parents[3] / "configs/jean-zay/7.5b.yaml")
    assert Path(f"{experiment.data.data_path}.bin").is_file()


def test_no_network(site: Site, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    address = "http://127.0.0.1:9/c.jsonl"  # discard: nobody listens
    assert fetched(address, f"{site.address}/none.txt", "--folder", str(tmp_path)) == 2
    todo = "see above, name a mirror with --mirror or TRIDOCK_DATA_MIRRORS, or copy the file there yourself"
    assert capsys.readouterr().err.splitlines() == [
        f"{address}: cannot be reached; got [Errno 111] Connection refused; "
        "check the network, the proxy (HTTPS_PROXY) and the certificates (SSL_CERT_FILE)",
        f"{tmp_path}/c.jsonl: no source has it; {todo}",
        f"{site.address}/none.txt: is refused; got 404 Not Found; correct the URL, or name a mirror",
        f"{tmp_path}/none.txt: no source has it; {todo}",
    ]


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["gpt3", "ftp://a.example/b", "http://a.example/"],
         ["SOURCE: is not the URL of a file; got 'gpt3'; give http(s)://…/FILE, or a known name: gpt2",
          "SOURCE: is not the URL of a file; got 'ftp://a.example/b'; give http(s)://…/FILE, or a known name: gpt2",
          "SOURCE: is not the URL of a file; got 'http://a.example/'; give http(s)://…/FILE, or a known name: gpt2"]),
        (["http://a.example/x.txt", "http://b.example/x.txt", "--sha256", "12"],
         ["SOURCE: is the name of two files; got x.txt; fetch them to two folders",
          "--sha256: is the hash of one file; got http://a.example/x.txt http://b.example/x.txt; give one URL",
          "--sha256: is not a SHA-256; got '12'; give 64 hexadecimal digits"]),
        (["http://a.example/x.txt", "--mirror", "file:///srv"],
         ["--mirror: is neither a folder nor a URL; got 'file:///srv'; give a folder, or http(s)://…"]),
    ],
)  # fmt: skip
def test_wrong_requests(argv: list[str], expected: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert fetched(*argv) == 2
    assert capsys.readouterr().err.splitlines() == expected


def test_the_known_files_have_hashes() -> None:
    assert all(one.sha256 and fetch._HASH.fullmatch(one.sha256) for files in KNOWN.values() for one in files)
