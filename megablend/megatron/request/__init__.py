"""The arguments with which Megatron's builder is called."""
