"""Read the blocks of coming steps ahead, within a memory budget, and estimate what is read."""
