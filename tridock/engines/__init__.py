"""An experiment to the argv, environment and files of its ranks, one module an engine. Pure."""

from tridock.engines.ranks import RankProgram, checkpoint_pointer, checkpoints_folder, rank_program

__all__ = ["RankProgram", "checkpoint_pointer", "checkpoints_folder", "rank_program"]
