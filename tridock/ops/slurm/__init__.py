"""``tridock slurm``: jobs rendered, submitted, followed and cancelled; and what runs inside of one."""
