"""Communication between the processes of a job, through MPI or torch.distributed."""
