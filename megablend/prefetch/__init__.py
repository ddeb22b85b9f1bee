"""What is read ahead: windows, memory, read amplification."""
