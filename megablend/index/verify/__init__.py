"""Whether an index and the files it names are as they were; repair, and removal of what no run needs."""
