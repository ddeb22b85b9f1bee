"""Communication between the processes of a job: a single process, MPI, torch.distributed."""
