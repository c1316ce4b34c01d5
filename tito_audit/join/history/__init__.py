"""Which calls of a log are one conversation, by what they saw and sampled."""

from tito_audit.join.history._index import HistoryIndex
from tito_audit.join.history._trace import Trace, Tracer
from tito_audit.join.history._traits import CallTraits, Conversations, Decode, JoinedBy, Reread
from tito_audit.join.history._trie import hash_of

__all__ = [
    "CallTraits",
    "Conversations",
    "Decode",
    "HistoryIndex",
    "JoinedBy",
    "Reread",
    "Trace",
    "Tracer",
    "hash_of",
]
