"""Forms of text from another machine or a folder that becomes part of a path, a command or a name.

:func:`tridock.contracts.codec.decode` checks them in every field that has one of these types.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

from tridock.contracts.files_below import is_below
from tridock.contracts.run_folder import is_run_id


@dataclass(frozen=True, slots=True)
class Form:
    """What a text must be; ``holds`` returns something true if it is."""

    name: str
    holds: Callable[[str], Any]


is_node_name = re.compile(r"[A-Za-z0-9_:][A-Za-z0-9_.:%-]{0,252}").fullmatch
RunId = Annotated[str, Form("run id", is_run_id)]
NodeName = Annotated[str, Form("name of a node", is_node_name)]
Sha256 = Annotated[str, Form("SHA-256", re.compile(r"[0-9a-f]{64}").fullmatch)]
NameBelow = Annotated[str, Form("name below a folder", is_below)]
is_index_map = re.compile(r"[^/\x00-\x1f]*_indexmap(_[^/\x00-\x1f]*\.npy|\.sha256)").fullmatch
IndexMapName = Annotated[str, Form("name of an index map", is_index_map)]
UtcTime = Annotated[str, Form("time as yyyymmdd-hhmmss", re.compile(r"\d{8}-\d{6}").fullmatch)]
