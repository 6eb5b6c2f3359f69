"""``tridock train``."""

from tridock.cli.options import Arguments, Commands, add_command, run_id_file
from tridock.contracts.appends import printing_to_a_full_disk


def add(commands: Commands) -> None:
    examples = (
        "",
        "--config configs/demo-3d.yaml --nproc 4 --set train.train_iters=100",
        "--config configs/demo.yaml --nnodes 2 --node-rank 1 --master-addr gpu-1",
    )
    parser = add_command(commands, "train", _train, "run an experiment on this machine", *examples)
    parser.add_config("a small GPT on the demo data, in 3D if the number of ranks allows it")
    parser.add_argument("--nproc", type=int, metavar="N", help="ranks to start (default: one per GPU; 2 without a GPU)")
    parser.add_workspace()
    parser.add_set()
    parser.add_flag("--force", "run even if the plan does not fit in GPU memory")
    parser.add_quiet()
    parser.add_argument("--run-id-file", type=run_id_file, metavar="FILE", help="write the run id to this file")
    nodes = parser.add_argument_group("several machines", "Run the command on each of them.")
    nodes.add_argument("--nnodes", type=int, default=1, metavar="N", help="number of machines (default: 1)")
    nodes.add_argument("--node-rank", type=int, default=0, metavar="N", help="rank of this machine (default: 0)")
    text = "address of the machine with node rank 0; the port is launch.master_port"
    nodes.add_argument("--master-addr", metavar="HOST", help=text)


def _train(arguments: Arguments) -> int:
    """Run an experiment on this machine or in this container, without ssh. tridock launch runs the same experiment
    on a cluster."""
    from tridock.ops.runs.default_experiment import choose_experiment
    from tridock.ops.runs.local_run import Place, ranks_here, run_here

    place = Place(arguments.nnodes, arguments.node_rank, arguments.master_addr)
    place.check()
    slots = place.slots(ranks_here(arguments.nproc))
    config, overrides, note = choose_experiment(arguments.named_config, arguments.set, slots)
    if note:
        from tridock.data.corpus import prepare_demo

        arguments.note(note)
        prepare_demo(arguments.workspace / "data" / "demo", report=arguments.note)
    with printing_to_a_full_disk():
        return run_here(
            config,
            arguments.nproc,
            arguments.workspace,
            overrides,
            arguments.run_id_file,
            place,
            force=arguments.force,
            quiet=arguments.quiet,
        ).exit_code
