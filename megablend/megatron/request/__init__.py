"""What Megatron's builder is asked for."""
