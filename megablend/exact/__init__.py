"""Computations of numpy and megatron-core, byte for byte and faster: functions that check input, choose a kernel and split work."""
