"""The tokenizer of a provider's model: found by its name, and compared with the server's own."""

from __future__ import annotations

from pathlib import Path

from tito_audit.errors import SetupError, TokenizerError
from tito_audit.provider import TokenProvider
from tito_audit.tokens.load import load_tokenizer
from tito_audit.tokens.tokenizer import Tokenizer


def as_tokenizer(tokenizer: Tokenizer | str | Path) -> Tokenizer:
    """The tokenizer itself, or that of a folder or hub name, loaded."""
    return tokenizer if isinstance(tokenizer, Tokenizer) else load_tokenizer(str(tokenizer))


_PROBE = "The year 2024: naïve café, 你好 🎉\n\n\t  def f(x):\n    return x  # ok, don't\r\n<b>1234567</b>"


async def find_misfit(provider: TokenProvider, tokenizer: Tokenizer) -> str | None:
    """How the server's own tokenizer differs; None if it does not, or if there is no endpoint to ask."""
    tokenized = getattr(provider, "tokenized", None)
    if tokenized is None:
        return None
    theirs: list[int] | None = await tokenized(_PROBE)
    ours = tokenizer.encode(_PROBE).tolist()
    if theirs is None or theirs == ours:
        return None
    shorter = min(len(ours), len(theirs))
    at = next((n for n in range(shorter) if ours[n] != theirs[n]), shorter)
    return (
        f"{provider.name} encodes a text in {len(theirs)} tokens and {tokenizer.name} in {len(ours)}; they differ "
        f"from token {at} on ({theirs[at : at + 3]} and {ours[at : at + 3]})"
    )


async def find_tokenizer(provider: TokenProvider) -> Tokenizer:
    """The tokenizer of the model that the server states, else of `provider.model`.

    SetupError if there is no name, if it cannot be loaded here, or if the server encodes otherwise.
    """
    find = getattr(provider, "find_tokenizer", None)
    name: str | None = provider.model if find is None else await find()
    if name is None:
        raise SetupError(
            f"{provider.name} does not state its model, so its tokenizer is not known.\n"
            "Pass tokenizer=FOLDER, or ProviderOptions(model=NAME)."
        )
    try:
        tokenizer = load_tokenizer(name)
    except TokenizerError as error:
        why = str(error).splitlines()[0]
        raise SetupError(
            f"{provider.name} serves {name}, and there is no tokenizer of that name here ({why}).\n"
            "Pass tokenizer=FOLDER, the folder or hub name of the model's tokenizer."
        ) from None
    difference = await find_misfit(provider, tokenizer)
    if difference is not None:
        raise SetupError(
            f"{provider.name} serves {name} with another tokenizer: {difference}.\nPass tokenizer=FOLDER."
        )
    return tokenizer
