"""Raw arrays of token ids (`.bin`, `.npy`), as nanoGPT, modded-nanogpt, llm.c, OLMo and lit-gpt
write them."""

from megablend.formats.raw.raw_format import RAW

__all__ = ["RAW"]
