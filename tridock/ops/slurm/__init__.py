"""``tridock slurm``: renders, submits, follows and cancels jobs; and the code that runs inside a job."""
