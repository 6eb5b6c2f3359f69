"""A run on a cluster with Slurm: what is asked of the scheduler, and the script that it is given. Pure."""
