"""What Megatron's builder is called with."""
