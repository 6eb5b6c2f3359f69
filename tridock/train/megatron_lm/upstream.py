"""Upstream's ``pretrain_gpt2.py`` of Megatron-LM v1.1.5 on today's torch; also for your own copies of its scripts.

As a program it is that file with upstream's options: a rank that ``deepspeed`` or ``torch.distributed.launch`` starts,
without a run folder. The image has it as ``/pretrain_gpt2.py``.
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

from tridock.contracts.prerequisites import megatron_source
from tridock.errors import Problem, RunError, TridockError
from tridock.train.megatron_lm.files import check_files, remove_stale

if TYPE_CHECKING:
    from tridock.train.rank.process_group import Ranks

_FILES: Final = ("--data-path", "--vocab-file", "--merge-file", "--split")


def prepare(ranks: Ranks, source: Path, *, quiet: bool = False) -> None:
    """Makes Megatron importable, with DeepSpeed on the ranks' process group; rank 0 prints what is replaced."""
    from tridock import compat
    from tridock.compat import megatron_v115
    from tridock.train.parallel.strategies import import_deepspeed
    from tridock.train.rank import process_group

    # Joins before Megatron's own initialization, which then uses this process group.
    import_deepspeed(ranks)
    replaced = compat.install(ranks.device.type, process_group.local_ranks())
    sys.path.insert(0, str(source))
    replaced += megatron_v115.adapt(ranks.device.type)
    if ranks.first and not quiet:
        print("".join(f"compat: {line}\n" for line in replaced), end="", flush=True)


def run(source: Path, argv: list[str], where: str, todo: str) -> None:
    """Runs it to its end. Raises :class:`RunError` at ``where`` if it gives up, or argparse does."""
    sys.argv = [str(source / "pretrain_gpt2.py"), *argv]
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as left:
        if left.code not in (0, None):
            raise RunError(Problem(where, "Megatron exited", f"exit code {left.code}", todo)) from None


def main() -> None:
    """Runs a rank with the options of the command line; prints only what every user can read of an error."""
    from tridock.train.rank import process_group
    from tridock.train.rank.run import end

    argv = [it.replace("--local-rank", "--local_rank") for it in sys.argv[1:]]
    for given in argv:
        if given.startswith("--local_rank="):
            os.environ.setdefault("LOCAL_RANK", given.partition("=")[2])
    try:
        source, ranks = megatron_source(), process_group.join()
        with process_group.agree_on_errors(ranks):
            if {*_FILES} <= {*argv}:
                check_files(argv)
                prefix, split = (argv[argv.index(it) + 1] for it in ("--data-path", "--split"))
                if ranks.local_rank == 0:
                    remove_stale(Path(prefix), split)
        prepare(ranks, source)
        run(source, argv, "megatron", "see the lines above")
    except process_group.AgreedError as agreed:
        if os.environ["RANK"] == "0":
            print(agreed.error, file=sys.stderr)
        end(agreed.error.exit_code)
    except TridockError as error:
        print(error, file=sys.stderr)
        end(error.exit_code)
    end(0, at_once=True)


if __name__ == "__main__":
    main()
