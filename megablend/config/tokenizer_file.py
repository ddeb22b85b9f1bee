"""Find the tokenizer.json that a config names, and the ids of its tokens."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megablend.config.complaints import Places
from megablend.errors import ConfigError

TOKENIZER = "tokenizer.json"
_MODEL_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
_ROLE_FILES = ("tokenizer_config.json", "special_tokens_map.json")
"""Files next to tokenizer.json that record the roles of tokens, such as eos_token."""


def find_tokenizer(given: str, base: Path = Path("/")) -> Path:
    """Return the path of the tokenizer.json that a config names.

    Args:
        given: the path of the file or of its folder, or the name of a model in the local Hugging
            Face cache.
        base: the folder for a relative path.

    Raises: ConfigError if there is no such file.
    """
    path = base / Path(given).expanduser()
    if path.is_file():
        return path
    if (path / TOKENIZER).is_file():
        return path / TOKENIZER
    tried = f"there is no file {path}, nor {path / TOKENIZER}"
    if _MODEL_NAME.fullmatch(given):
        home = os.environ.get("HF_HOME", "~/.cache/huggingface")
        hub = Path(os.environ.get("HF_HUB_CACHE", f"{home}/hub")).expanduser()
        model = hub / f"models--{given.replace('/', '--')}"
        snapshots = sorted(model.glob(f"snapshots/*/{TOKENIZER}"))
        main = model / "refs" / "main"
        revision = main.read_text(encoding="utf-8").strip() if main.is_file() else ""
        if snapshots:
            of_main = [path for path in snapshots if path.parent.name == revision]
            return of_main[0] if of_main else snapshots[-1]
        tried += f", nor a model in {model}"
    name = given.removeprefix("hf://")
    is_name = _MODEL_NAME.fullmatch(name)
    download = f", or download the model (`hf download {name} {TOKENIZER}`)" if is_name else ""
    raise ConfigError(
        f"tokenizer: found {given!r}, but {tried}; give the path of a tokenizer.json{download}"
    )


def find_named_token(tokenizer: Path, name: str) -> int:
    """Return the id of the token with the role `name` (`eos_token` or `bos_token`). The roles are
    read from a file next to tokenizer.json. Raises: ConfigError."""
    for file in _ROLE_FILES:
        path = tokenizer.parent / file
        if path.is_file():
            token = _load(path).get(name)
            text = token.get("content") if isinstance(token, dict) else token
            if isinstance(text, str):
                return find_token(tokenizer, text)
    remedy = (
        "set `append_eod` to the token's text" if name == "eos_token" else "use add_special_tokens"
    )
    raise ConfigError(
        f"{tokenizer}: no {name} is set in {' or '.join(_ROLE_FILES)} next to it; {remedy}"
    )


def find_token(tokenizer: Path, text: str) -> int:
    """Return the id of the token with the given text. Raises: ConfigError if there is no such
    token."""
    ids = read_ids(tokenizer)
    if text not in ids:
        known = ", ".join(map(repr, list(ids)[:5]))
        raise ConfigError(
            f"{tokenizer}: has no token {text!r}; expected a token in its vocabulary, such as {known}"
        )
    return ids[text]


def read_ids(tokenizer: Path) -> dict[str, int]:
    """Return the ids of a tokenizer's tokens, by their texts; at least one, added tokens first.

    Args:
        tokenizer: path of a tokenizer.json, as Hugging Face's tokenizers library writes it.

    Raises: ConfigError if the file cannot be read, or is not a tokenizer.
    """
    added, vocab = _read_tokens(tokenizer)
    # Of two ids of a text, `token_to_id` of Hugging Face's library returns that of the added token
    return added | vocab | added


def read_vocab_size(tokenizer: Path) -> int:
    """Return the vocabulary size of a tokenizer: its largest id, including added tokens, plus one.
    Raises: see `read_ids`."""
    added, vocab = _read_tokens(tokenizer)
    return max([*added.values(), *vocab.values()]) + 1


def _read_tokens(tokenizer: Path) -> tuple[dict[str, int], dict[str, int]]:
    """Return the ids of a tokenizer's added tokens, and of its model's vocabulary, by their texts.
    Raises: see `read_ids`."""
    data = _load(tokenizer)
    try:
        vocab = data["model"]["vocab"]
        if isinstance(vocab, list):  # pairs of a token and its score
            vocab = {token: number for number, (token, *_) in enumerate(vocab)}
        added = {token["content"]: token["id"] for token in data.get("added_tokens") or ()}
        largest = max([*added.values(), *vocab.values()])
        if not isinstance(largest, int) or largest < 0:
            raise TypeError(f"the largest token id is {largest!r}")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{tokenizer}: is not a tokenizer.json ({type(error).__name__}: {error}); save it again with `tokenizer.save`, or "
            "give `vocab_size` as a number"
        ) from error
    return added, vocab


def with_eods(data: Mapping[str, Any], base: Path, places: Places) -> Mapping[str, Any]:
    """Return the keys of a config, with a token id as the `append_eod` of each source. If it is the
    text of a token, it is replaced by the token's id; with `eos`, it is set to the tokenizer's
    end-of-text token. Raises: ConfigError."""
    sources = data.get("sources")
    tokenizer = data.get("tokenizer")
    if not isinstance(tokenizer, str | os.PathLike):
        return data
    name = os.fspath(tokenizer)

    def resolve(source: Any, *location: str | int) -> Any:
        if not isinstance(source, Mapping):
            return source
        eod = source.get("append_eod")
        wants_eos = source.get("eos") is True
        if wants_eos and eod is not None:
            raise ConfigError(
                f"{places.describe(location)}: eos and append_eod both set the token that ends documents; keep only "
                "one"
            )
        if wants_eos:
            return {
                **source,
                "append_eod": find_named_token(find_tokenizer(name, base), "eos_token"),
            }
        if isinstance(eod, str):
            return {**source, "append_eod": find_token(find_tokenizer(name, base), eod)}
        return source

    def resolve_all(listed: Any, *above: str) -> Any:
        if not isinstance(listed, list | tuple):
            return listed
        return [resolve(source, *above, i) for i, source in enumerate(listed)]

    if isinstance(sources, Mapping):
        resolved: Any = {
            key: resolve_all(listed, "sources", key) for key, listed in sources.items()
        }
    else:
        resolved = resolve_all(sources, "sources")
    return {**data, "sources": resolved}


def _load(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file. Raises: ConfigError."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"{path}: cannot read the tokenizer: {error.strerror}; correct the path, or give `vocab_size` as a number"
        ) from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f"{path}: cannot read the tokenizer ({error}); save it again with `tokenizer.save`"
        ) from error
    if not isinstance(data, dict):
        raise ConfigError(
            f"{path}: found {type(data).__name__}, expected the object that `tokenizer.save` writes; give "
            "`vocab_size` as a number"
        )
    return data
