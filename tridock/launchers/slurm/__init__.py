"""Runs on a Slurm cluster: the request to the scheduler and the sbatch script. Pure."""
