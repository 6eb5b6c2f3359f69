"""Lines as Megatron prints them, in the form of v1.1.5, of 2021 and of today; the numbers are ours."""

from __future__ import annotations


def v115(iteration: int, loss: float, ms: float = 250.0, end: int = 100) -> str:
    return (
        f" iteration {iteration:8d}/{end:8d} | elapsed time per iteration (ms): {ms:.1f} |"
        f" learning rate: {1.5e-4:.3E} | lm loss: {loss:.6E} | loss scale: 4096.0 |"
        " number of skipped iterations:   0 | number of nan iterations:   0 |\n"
    )


def of_2021(iteration: int, loss: float, ms: float = 250.0, end: int = 100) -> str:
    return (
        f" iteration {iteration:8d}/{end:8d} | consumed samples: {iteration * 8:12d} |"
        f" elapsed time per iteration (ms): {ms:.1f} | learning rate: {1.5e-4:.3E} | global batch size: {8:5d} |"
        f" lm loss: {loss:.6E} | loss scale: 4096.0 | grad norm: 1.250 |"
        " number of skipped iterations:   1 | number of nan iterations:   0 |\n"
    )


def today(iteration: int, loss: float, ms: float = 250.0, end: int = 100) -> str:
    return (
        f" [2026-01-02 03:04:05.678901] iteration {iteration:8d}/{end:8d} | consumed samples: {iteration * 8:12d} |"
        f" elapsed time per iteration (ms): {ms:.1f} | throughput per GPU (TFLOP/s/GPU): 312.5 |"
        f" learning rate: {1.5e-4:.6E} | global batch size: {8:5d} | lm loss: {loss:.6E} | loss scale: 1.0 |"
        " grad norm: 1.250 | num zeros: 0 | number of skipped iterations:   0 | number of nan iterations:   0 |\n"
    )


TIMES = "time (ms) | forward-compute: 53.25 | backward-compute: 138.50 | optimizer: 49.00\n"
TIMES_TODAY = (
    "(min, max) time across ranks (ms):\n"
    f"    {'forward-backward '.ljust(48, '.')}: (190.25, 210.50)\n"
    f"    {'optimizer '.ljust(48, '.')}: (20.00, 21.75)\n"
)
TIMES_MAX = f"max time across ranks (ms):\n    {'forward-backward '.ljust(48, '.')}: 210.50\n"
TIMES_ALL = "times across ranks (ms):\n  forward-backward:\n     rank  0: 190.25\n     rank  1: 210.50\n"
ARGUMENTS = (
    "------------------------ arguments ------------------------\n"
    + "".join(
        f"  {name} {'.' * (48 - len(name))} {value}\n"
        for name, value in {
            "global_batch_size": 8,
            "hidden_size": 64,
            "num_attention_heads": 4,
            "num_layers": 2,
            "padded_vocab_size": 512,
            "pipeline_model_parallel_size": 2,
            "seq_length": 32,
            "tensor_model_parallel_size": 1,
        }.items()
    )
    + "-------------------- end of arguments ---------------------\n"
    "using world size: 2, data-parallel size: 1, tensor-model-parallel size: 1\n"
)
EVALUATED = " validation loss at iteration 20 | lm loss value: 6.250000E+00 | lm loss PPL: 5.180128E+02 | \n"
EVALUATED_TODAY = (
    " validation loss at iteration 20 on validation set | lm loss value: 6.250000E+00 | lm loss PPL: 5.18E+02 | \n"
    " validation loss at iteration 20 on test set | lm loss value: 6.500000E+00 | lm loss PPL: 6.65E+02 | \n"
)
MEMORY = (
    "[Rank 1] (after 10 iterations) memory (MB) | allocated: 10.5 | max allocated: 20.5"
    " | reserved: 30.0 | max reserved: 40.0\n"
)
