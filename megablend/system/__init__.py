"""What the operating system grants and refuses: its errors, private folders, files in folders that others write to."""
