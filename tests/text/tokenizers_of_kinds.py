"""Small tokenizers of the structures of real ones, trained once a session, and text for them."""

from __future__ import annotations

import json
import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("msgspec", reason="pip install 'megablend[text]'")
tokenizers = pytest.importorskip("tokenizers", reason="pip install 'megablend[text]'")

ROOT = Path(__file__).parents[2]
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
O200K = "|".join(
    [
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)
DEEPSEEK: tuple[str, ...] = (
    r"\p{N}{1,3}",
    "[一-龥\u3040-ゟ\u30a0-ヿ]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+|"""
    r""" ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+""",
)
DEEPSEEK = tuple(each.replace(r"\r\n", "\r\n") for each in DEEPSEEK)
END = "<|endoftext|>"
KINDS = ("gpt2", "llama3", "qwen2", "o200k", "deepseek", "llama2", "unigram", "wordpiece")
FAST = KINDS[:6]


@cache
def corpus() -> tuple[str, ...]:
    """Code, English, and other scripts."""
    files = sorted([*(ROOT / "megablend").rglob("*.py"), *(ROOT / "docs").rglob("*.md")])
    texts = [path.read_text(encoding="utf-8") for path in files]
    chosen = random.Random(3)
    other = "天地玄黃宇宙洪荒日月盈昃 いろはにほへとちりぬるを 나랏말싸미 Ça été naïve Größe привет 🙂 ١٢٣ हिन्दी"
    # The numbers in files change with them: tokens of several digits there are always
    texts += ["12345 3.14 " * 270] * 8
    lengths = [chosen.randrange(300) for _ in range(300)]
    texts += ["".join(chosen.choices(other, k=length)) for length in lengths]
    return tuple(text[at : at + 3000] for text in texts for at in range(0, len(text), 3000))


@cache
def definition(kind: str) -> str:
    """The tokenizer.json of a kind."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    special = [END] if kind != "llama2" else ["<unk>", "<s>", "</s>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    if kind == "unigram":
        tokenizer = Tokenizer(models.Unigram())
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
        trainer: Any = trainers.UnigramTrainer(
            vocab_size=800, special_tokens=["<unk>", END], unk_token="<unk>", show_progress=False
        )
    elif kind == "wordpiece":
        tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
        tokenizer.normalizer = normalizers.BertNormalizer()
        tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        trainer = trainers.WordPieceTrainer(
            vocab_size=1500, special_tokens=["[UNK]", END], show_progress=False
        )
    elif kind == "llama2":
        tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
        tokenizer.normalizer = normalizers.Sequence(
            [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        )
        # Trained on words, which the model then has without a pre-tokenizer
        tokenizer.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
        bytes_ = [f"<0x{i:02X}>" for i in range(256)]
        trainer = trainers.BpeTrainer(
            vocab_size=2000, special_tokens=[*special, *bytes_], show_progress=False
        )
    else:
        tokenizer = Tokenizer(models.BPE())
        splits = {"llama3": [LLAMA3], "qwen2": [QWEN2], "o200k": [O200K], "deepseek": DEEPSEEK}
        level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=kind == "gpt2")
        steps = [pre_tokenizers.Split(Regex(each), "isolated") for each in splits.get(kind, [])]
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*steps, level]) if steps else level
        tokenizer.decoder = decoders.ByteLevel()
        if kind == "qwen2":
            tokenizer.normalizer = normalizers.NFC()
        if kind == "deepseek":
            tokenizer.normalizer = normalizers.Sequence([])
        trainer = trainers.BpeTrainer(
            vocab_size=2000, special_tokens=special, initial_alphabet=alphabet, show_progress=False
        )
    tokenizer.train_from_iterator(corpus()[::4], trainer)
    data = json.loads(tokenizer.to_str())
    if kind == "llama2":
        data["pre_tokenizer"] = None
        for added in data["added_tokens"][3:]:  # they are the model's own
            added["special"] = False
        data["added_tokens"] = data["added_tokens"][:3]
    if kind == "qwen2":
        for added in data["added_tokens"]:
            added["normalized"] = False
    return json.dumps(data)


def write_tokenizer(folder: Path, kind: str = "gpt2") -> Path:
    """A folder with the tokenizer of a kind, which names the token that ends texts."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(definition(kind), encoding="utf-8")
    end = "</s>" if kind == "llama2" else END
    named = {"eos_token": end, "bos_token": {"content": end}}
    (folder / "tokenizer_config.json").write_text(json.dumps(named), encoding="utf-8")
    return folder
