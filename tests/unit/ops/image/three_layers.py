"""The layers and the configuration of a small image."""

import io
import json
import tarfile

from tridock.ops.image.archive import digest_of


def layer(name: str) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        tar.addfile(tarfile.TarInfo(name))
    return packed.getvalue()


LAYERS = tuple(layer(name) for name in ("base", "packages", "code"))
DIFF_IDS = tuple(map(digest_of, LAYERS))
CONFIG = json.dumps({"rootfs": {"diff_ids": DIFF_IDS}}).encode()
