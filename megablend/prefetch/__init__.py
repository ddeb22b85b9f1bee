"""Reading ahead: windows of steps, memory budget, the read pipeline, read amplification."""
