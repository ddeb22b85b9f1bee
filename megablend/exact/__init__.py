"""What numpy and megatron-core compute, byte for byte and faster: entry points that check, choose a kernel and share its work."""
