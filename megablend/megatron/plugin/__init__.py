"""The classes that Megatron-LM loads in place of its own."""
