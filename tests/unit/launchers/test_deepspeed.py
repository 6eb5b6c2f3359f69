"""DeepSpeed's environment file and command line."""

from tridock.engines import RankProgram
from tridock.launchers.deepspeed import deepspeed_command, environment_file, without_steps

PROGRAM = RankProgram("tridock.train", ("--run-folder", "/workspace/runs/x"))


def test_no_blank_or_comment_line_which_deepspeed_cannot_read() -> None:
    assert environment_file({"A": "1", "B": ""}) == "A=1\nB=\n"
    assert environment_file({}) == ""


def test_two_nodes_go_over_pdsh() -> None:
    command = deepspeed_command(PROGRAM, {"a": [0, 1], "b": [0, 1]}, "/r/hostfile", "192.0.2.1", 29500)
    assert command.render() == (
        "deepspeed --hostfile /r/hostfile --master_addr 192.0.2.1 --master_port 29500 --launcher pdsh --no_ssh_check "
        "--no_local_rank --module tridock.train --run-folder /workspace/runs/x"
    )


def test_single_slots_are_named_in_deepspeeds_own_grammar() -> None:
    argv = deepspeed_command(PROGRAM, {"a": [4, 5], "b": [0, 1]}, "/r/hostfile", "a", 1).argv
    assert argv[argv.index("--include") + 1] == "a:4,5@b:0,1"


def test_one_node_needs_no_ssh() -> None:
    argv = deepspeed_command(PROGRAM, {"a": [0, 1]}, "/r/hostfile", "a", 1).argv
    assert argv[7:10] == ("--no_ssh", "--node_rank", "0")
    assert "pdsh" not in argv


def test_usual_arguments_stay_readable() -> None:
    program = RankProgram("m", ("--data-path", "/w/data/x_text", "--split", "80,10,10", "--lr", "1e-05"))
    many = deepspeed_command(program, {"a": [0], "b": [0]}, "/r/hostfile", "a", 1)
    assert many.argv[-6:] == program.arguments


def test_a_launch_does_not_show_the_launchers_own_steps() -> None:
    """As DeepSpeed 0.19.8 printed them, in whatever parts they come."""
    steps = (
        b"[2026-11-23 08:23:45,934] [INFO] [runner.py:618:main] cmd = pdsh -S -f 1024 -w a,b export X=1; cd /w\n"
        b"node-1: [2026-11-23 08:23:50,014] [INFO] [launch.py:152:main] WORLD INFO DICT: {'node-1': [0, 1]}\n"
        b"[2026-11-23 08:23:45,935] [INFO] [multinode_runner.py:95:get_cmd] Running on the following workers: a,b\n"
    )
    others = (
        b"node-1: iteration  1/60 | loss 8.3561\n"
        b"node-2: [2026-11-23 08:23:50,014] [ERROR] [launch.py:352:sigkill_handler] ['x'] exits with return code = 1\n"
        b"[2026-11-23 08:23:50,014] [INFO] [logging.py:1:log_dist] of the engine\n"
        b"\nno newline"
    )
    output = steps + others
    for size in (1, 7, 64, len(output)):
        parts = [output[place : place + size] for place in range(0, len(output), size)]
        assert b"".join(without_steps(parts)) == others
