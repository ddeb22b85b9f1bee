"""The mirror's client in processes that read files: the ranks of a training job, and commands."""
