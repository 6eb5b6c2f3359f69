"""``<prefix>.json`` beside a data set: its inputs, tokenizer, counts and checksums."""

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tridock.contracts.run_folder import write_atomic
from tridock.errors import Problem, RequestError, reason_of


class Input(BaseModel):
    """A file that was read: its name, and what identifies its content."""

    model_config = ConfigDict(frozen=True)

    name: str
    bytes: int
    sha256: str


class DatasetManifest(BaseModel):
    """Facts that later steps rely on. Unknown fields, of a newer Tridock, are ignored."""

    model_config = ConfigDict(frozen=True)

    vocab_size: int = Field(gt=0)
    documents: int = Field(ge=0)
    tokens: int = Field(ge=0)
    tokenizer_sha256: str
    """:func:`tridock.contracts.tokenizers.tokenizer_sha256`, or of another tokenizer's file; empty if unknown."""
    end_of_document: int | None
    """Token id that ends every document, or None."""
    inputs: tuple[Input, ...]
    json_key: str = "text"
    sequences: int | None = None
    """Sequences in the index; None in older manifests."""
    rejected: int = 0
    """Lines of the inputs that were skipped."""
    versions: dict[str, str] = Field(default_factory=dict)
    bin_sha256: str | None = None
    """SHA-256 of ``<prefix>.bin``, and below of ``<prefix>.idx``; None in older manifests."""
    idx_sha256: str | None = None
    part: str | None = None
    """The source data set and document range, if `tridock data split` wrote this data set."""


def manifest_path(prefix: Path) -> Path:
    """Returns ``<prefix>.json``; a prefix may contain dots."""
    return prefix.parent / f"{prefix.name}.json"


def write_manifest(prefix: Path, manifest: DatasetManifest) -> None:
    """Writes the manifest of a data set, atomically."""
    write_atomic(manifest_path(prefix), (manifest.model_dump_json(indent=2) + "\n").encode())


def read_manifest(prefix: Path) -> DatasetManifest | None:
    """Returns the manifest, or None if there is none (Megatron's tools write none)."""
    path = manifest_path(prefix)
    try:
        return DatasetManifest.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except OSError as error:
        todo = "make it readable for this user, or delete it and set model.vocab_size"
        raise RequestError(Problem(str(path), "cannot be read", reason_of(error), todo)) from None
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        got = f"{'.'.join(str(part) for part in first['loc']) or 'the file'}: {first['msg']}"
        todo = "build the data again with `tridock data preprocess`, or delete this file and set model.vocab_size"
        raise RequestError(Problem(str(path), "is not a data set's manifest", got, todo)) from None
