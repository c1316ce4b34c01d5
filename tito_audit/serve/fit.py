"""Whether a provider's model reads ids as the gateway's tokenizer writes them."""

from __future__ import annotations

from tito_audit.errors import ProviderError
from tito_audit.provider import TokenProvider
from tito_audit.tokens.tokenizer import Tokenizer

_PROBE = "The year 2024: naïve café, 你好 🎉\n\n\t  def f(x):\n    return x  # ok, don't\r\n<b>1234567</b>"


async def misfit(provider: TokenProvider, tokenizer: Tokenizer) -> str | None:
    """How the server's own tokenizer differs from this one; None if it does not, or if the server has no endpoint
    for it. ProviderError if the server does not answer.
    """
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


async def fit_notice(provider: TokenProvider, tokenizer: Tokenizer) -> tuple[str | None, str | None]:
    """Why the gateway must not serve, and a notice for the user; at least one of them is None.

    The provider knows the name of its model afterwards, if its server answers.
    """
    find = getattr(provider, "find_model", None)
    try:
        if find is not None:
            await find()
        return await misfit(provider, tokenizer), None
    except ProviderError as error:
        return None, f"the server's tokenizer was not compared: {error}"
