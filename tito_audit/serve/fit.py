"""Whether a provider's model reads ids as the gateway's tokenizer writes them."""

from __future__ import annotations

from tito_audit.errors import ProviderError
from tito_audit.provider import TokenProvider
from tito_audit.sessions.fit import misfit
from tito_audit.tokens.tokenizer import Tokenizer


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
