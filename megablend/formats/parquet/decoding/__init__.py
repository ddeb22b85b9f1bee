"""From the bytes of pages to tokens."""
