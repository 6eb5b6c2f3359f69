"""`tridock data` in the image, by a user who is not root, on inputs that nobody wishes for."""

from __future__ import annotations

from tests.integration.support import Containers

SCRIPT = r"""
cd "$(mktemp -d)"
python - <<'PYTHON'
import json, lzma, zstandard
line = json.dumps({"text": "one two three"}).encode() + b"\n"
first, second = lzma.compress(line * 2), bytearray(lzma.compress(line))
open("padded.xz", "wb").write(first + bytes(8) + second)
second[0] ^= 1
open("flipped.xz", "wb").write(first + second)
window = zstandard.ZstdCompressionParameters(window_log=zstandard.WINDOWLOG_MAX)
stream = zstandard.ZstdCompressor(compression_params=window).compressobj()
open("long.zst", "wb").write(b"\x50\x2a\x4d\x18\x01\0\0\0x" + stream.compress(line * 4) + stream.flush())
open("a.jsonl", "wb").write(line * 3)
open(b"z\xff.jsonl", "wb").write(line)
open("deep.jsonl", "w").write('{"text": ' + "[" * 100_000 + "]" * 100_000 + "}\n")
open("newlines.jsonl", "w").write(json.dumps({"text": "\n" * 200_000}) + "\n")
PYTHON
mkdir -p folder/unreadable && cp a.jsonl folder && chmod 000 folder/unreadable
tridock data train-tokenizer --quiet --input newlines.jsonl --vocab-size 280 --output t >said; echo "newlines $?"
preprocess() {
    name=$1; shift
    tridock data preprocess --tokenizer-type GPT2BPETokenizer --vocab-file t --workers 2 --quiet "$@" >said 2>&1
    echo "$name $? $(tail -n 1 said | sed 's/; .*//')"
}
preprocess padded --output-prefix o --input padded.xz
preprocess flipped --output-prefix p --input flipped.xz
preprocess long --output-prefix o --input long.zst
preprocess folder --output-prefix p --input folder
preprocess name --output-prefix o --input z*.jsonl
preprocess deep --output-prefix p --input deep.jsonl
preprocess closed --output-prefix p --input - <&-
preprocess rejects --output-prefix p --input a.jsonl --on-error skip --rejects /dev/stdout
truncate -s -3 o_text_document.idx
tridock data verify o_text_document 2>/dev/null; echo "verify $?"
tridock data inspect o_text_document 2>/dev/null; echo "inspect $?"
ls -A | grep '^[.]\|^p' | grep -v 'padded' ; [ -L /dev/stdout ] && echo "nothing else"
"""


def test_inputs_that_nobody_wishes_for(containers: Containers) -> None:
    done = containers.run("bash", "-c", SCRIPT, options=("--user", "1234:1234"))
    assert done.stdout.splitlines() == [
        "newlines 0",
        "padded 0 o_text_document: 3 documents in, 3 out (0 empty), 0 rejected",
        "flipped 2 flipped.xz:3: the rest of the file cannot be read",
        "long 0 o_text_document: 4 documents in, 4 out (0 empty), 0 rejected",
        "folder 2 folder/unreadable: cannot be read",
        "name 0 o_text_document: 1 documents in, 1 out (0 empty), 0 rejected",
        "deep 2 deep.jsonl:1: is nested too deep",
        "closed 2 standard input: is closed",
        "rejects 2 --rejects: is a folder, device or pipe, not a file",
        "verify 2",
        "inspect 2",
        "nothing else",
    ], done.stderr
